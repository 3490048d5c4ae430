#include "schedule.h"

#include "scheduler.h"

#include <chrono>

namespace sidestream {

void Schedule::recorded(Recording& recording) {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  recording.completed_us = std::chrono::duration<double, std::micro>(now).count();
}

} // namespace sidestream
