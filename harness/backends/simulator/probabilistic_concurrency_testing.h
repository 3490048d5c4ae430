// PCT: Burckhardt, Kothari, Musuvathi and Nagarakatte, "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs",
// ASPLOS 2010.
//
// The threads are the streams and the host; n counts them. Each has a random priority from d on, and of those that can make a step
// the one with the highest makes it. At d - 1 steps, drawn from 1 to k, the thread that makes the step falls to a priority below d:
// at the i-th of them, to d - i. A program of at most k steps that shows a bug when d constraints on its order hold shows it with a
// probability of at least 1 / (n k^(d-1)).
//
// A step of a stream is a launch that runs; a step of the host is a launch that it enqueues, with what it does before: recordings and
// waits cost nothing, and a host that waits makes no step until what it waits for is complete. So a body of m launches has 2 m steps.
#pragma once

#include "schedule.h"
#include "seeded_numbers.h"

#include <unordered_map>

namespace sidestream {

class ProbabilisticConcurrencyTesting final : public Schedule {
 public:
  // `depth` is d, from 1 on; `steps` is k, from 1 on.
  ProbabilisticConcurrencyTesting(uint64_t seed, int64_t depth, int64_t steps);

  void restart() override;
  Stream* next(const std::vector<Stream*>& ready, bool host_waits) override;
  void enqueued(Stream& stream, Task&, const Launch&) override;
  void starts(Stream& stream, const Task&) override;
  std::vector<std::pair<std::string, double>> report() const override;

 private:
  uint64_t draw_priority();
  uint64_t& priority_of(const Stream& stream);
  // The thread with this priority has made a step.
  void made_step(uint64_t& priority);

  const uint64_t seed_;
  const int64_t depth_;
  const int64_t most_steps_;
  SeededNumbers numbers_;
  std::vector<int64_t> change_points_; // the i-th, from 0
  uint64_t host_priority_ = 0;
  std::unordered_map<const Stream*, uint64_t> stream_priorities_;
  int64_t steps_ = 0;
};

} // namespace sidestream
