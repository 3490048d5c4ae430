// Random walk: each step is made by one of the streams that can make one, or by the host if it does not wait, each as likely as the
// others. The baseline that randomized schedulers are measured against (Thomson, Donaldson and Betts, "Concurrency Testing Using
// Schedule Bounding: an Empirical Study", PPoPP 2014).
#pragma once

#include "schedule.h"
#include "seeded_numbers.h"

namespace sidestream {

class RandomWalk final : public Schedule {
 public:
  explicit RandomWalk(uint64_t seed) : seed_(seed), numbers_(seed) {}

  void restart() override;
  Stream* next(const std::vector<Stream*>& ready, bool host_waits) override;
  void enqueued(Stream&, Task&, const Launch&) override { steps_++; }
  void starts(Stream&, const Task&) override { steps_++; }
  // Each time the host asks, the streams have another chance.
  bool moves_when_asked() const override { return true; }
  std::vector<std::pair<std::string, double>> report() const override;

 private:
  uint64_t seed_;
  SeededNumbers numbers_;
  int64_t steps_ = 0;
};

} // namespace sidestream
