#include "virtual_time.h"

#include "scheduler.h"
#include "streams.h"

#include <algorithm>

namespace sidestream {
namespace {

constexpr double kMebibyte = 1024 * 1024;

size_t number_of(const Stream& stream) {
  return static_cast<size_t>(stream.device * kStreamsOfDevice + stream.id);
}

} // namespace

VirtualTime::VirtualTime(const VirtualCosts& costs) : costs_(costs), ready_us_(kDevices * kStreamsOfDevice) {}

void VirtualTime::restart() {
  host_us_ = 0;
  steps_ = 0;
  std::fill(ready_us_.begin(), ready_us_.end(), 0.0);
}

double& VirtualTime::ready_us(const Stream& stream) {
  return ready_us_[number_of(stream)];
}

double VirtualTime::completed_us(const Stream& stream) const {
  return ready_us_[number_of(stream)];
}

double VirtualTime::end_us(const Stream& stream, const Task& task) const {
  return std::max(completed_us(stream), task.issued_us) + task.duration_us;
}

Stream* VirtualTime::next(const std::vector<Stream*>& ready, bool host_waits) {
  Stream* first = nullptr;
  double first_us = 0;
  for (auto* stream : ready) {
    const auto& task = stream->tasks.front();
    auto end = end_us(*stream, task);
    if (!first || end < first_us || (end == first_us && task.turn < first->tasks.front().turn)) {
      first = stream;
      first_us = end;
    }
  }
  return host_waits || first_us <= host_us_ ? first : nullptr;
}

void VirtualTime::enqueued(Stream&, Task& task, const Launch& launch) {
  host_us_ += costs_.launch_us;
  task.issued_us = host_us_;
  if (launch.cycles > 0) {
    task.duration_us = static_cast<double>(launch.cycles) / kCyclesPerMicrosecond;
    return;
  }
  task.duration_us = costs_.operation_us;
  if (launch.copied_bytes > 0) {
    task.duration_us += costs_.copy_us_per_mib * static_cast<double>(launch.copied_bytes) / kMebibyte;
    return;
  }
  for (const auto& access : launch.accesses) {
    task.duration_us += costs_.operation_us_per_mib * static_cast<double>(access.stop - access.start) / kMebibyte;
  }
}

void VirtualTime::starts(Stream& stream, const Task& task) {
  steps_++;
  auto& ready = ready_us(stream);
  ready = end_us(stream, task);
  host_us_ = std::max(host_us_, ready); // the host is later only if it waits
}

void VirtualTime::recorded(Recording& recording) {
  recording.completed_us = std::max(recording.completed_us, completed_us(*recording.stream));
}

void VirtualTime::waited(Stream& stream, const Recording& recording) {
  auto& ready = ready_us(stream);
  ready = std::max(ready, recording.completed_us);
}

std::vector<std::pair<std::string, double>> VirtualTime::report() const {
  return {{"host_us", host_us_}, {"steps", static_cast<double>(steps_)}};
}

} // namespace sidestream
