#include "random_walk.h"

#include "scheduler.h"

#include <algorithm>

namespace sidestream {

void RandomWalk::restart() {
  numbers_ = SeededNumbers(seed_);
  steps_ = 0;
}

Stream* RandomWalk::next(const std::vector<Stream*>& ready, bool host_waits) {
  auto drawn = numbers_.below(ready.size() + (host_waits ? 0 : 1));
  return drawn < ready.size() ? ready[drawn] : nullptr;
}

std::vector<std::pair<std::string, double>> RandomWalk::report() const {
  return {{"steps", static_cast<double>(steps_)}};
}

} // namespace sidestream
