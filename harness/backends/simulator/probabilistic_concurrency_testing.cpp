#include "probabilistic_concurrency_testing.h"

#include "scheduler.h"

#include <algorithm>

namespace sidestream {

ProbabilisticConcurrencyTesting::ProbabilisticConcurrencyTesting(uint64_t seed, int64_t depth, int64_t steps)
    : seed_(seed), depth_(depth), most_steps_(steps), numbers_(seed) {
  restart();
}

void ProbabilisticConcurrencyTesting::restart() {
  numbers_ = SeededNumbers(seed_);
  steps_ = 0;
  stream_priorities_.clear();
  change_points_.clear();
  for (int64_t i = 1; i < depth_; i++) {
    change_points_.push_back(1 + static_cast<int64_t>(numbers_.below(static_cast<uint64_t>(most_steps_))));
  }
  host_priority_ = draw_priority();
}

// Any number from d on, so that threads that are seen later find their place among the others as in a permutation of all.
uint64_t ProbabilisticConcurrencyTesting::draw_priority() {
  auto lowest = static_cast<uint64_t>(depth_);
  return lowest + numbers_.below(UINT64_MAX - lowest);
}

uint64_t& ProbabilisticConcurrencyTesting::priority_of(const Stream& stream) {
  auto known = stream_priorities_.find(&stream);
  if (known == stream_priorities_.end()) {
    known = stream_priorities_.emplace(&stream, draw_priority()).first;
  }
  return known->second;
}

Stream* ProbabilisticConcurrencyTesting::next(const std::vector<Stream*>& ready, bool host_waits) {
  auto* highest = *std::max_element(ready.begin(), ready.end(), [this](const Stream* one, const Stream* other) {
    return priority_of(*one) < priority_of(*other);
  });
  return host_waits || priority_of(*highest) > host_priority_ ? highest : nullptr;
}

void ProbabilisticConcurrencyTesting::made_step(uint64_t& priority) {
  steps_++;
  for (size_t i = 0; i < change_points_.size(); i++) {
    if (change_points_[i] == steps_) {
      priority = static_cast<uint64_t>(depth_) - 1 - i;
    }
  }
}

void ProbabilisticConcurrencyTesting::enqueued(Stream& stream, Task&, const Launch&) {
  priority_of(stream);
  made_step(host_priority_);
}

void ProbabilisticConcurrencyTesting::starts(Stream& stream, const Task&) {
  made_step(priority_of(stream));
}

std::vector<std::pair<std::string, double>> ProbabilisticConcurrencyTesting::report() const {
  return {
      {"threads", static_cast<double>(stream_priorities_.size() + 1)}, {"steps", static_cast<double>(steps_)}};
}

} // namespace sidestream
