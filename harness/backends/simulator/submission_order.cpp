#include "submission_order.h"

#include "scheduler.h"

#include <algorithm>

namespace sidestream {

Stream* SubmissionOrder::next(const std::vector<Stream*>& ready, bool) {
  return *std::min_element(ready.begin(), ready.end(), [](const Stream* one, const Stream* other) {
    return one->tasks.front().turn < other->tasks.front().turn;
  });
}

} // namespace sidestream
