// Virtual time: a discrete-event simulation (Misra, "Distributed Discrete-Event Simulation", ACM Computing Surveys 1986) in which the
// host and each stream have a clock, and a launch takes effect when the clocks say so, whatever it costs this machine.
//
// The host's clock, one for all of its threads, is advanced by each launch that it enqueues (`launch_us`), by each question whether
// something is complete (`query_us`), and by waiting, until what it waits for is complete. A launch starts when it has been enqueued,
// the launch before it on its stream is complete, and so is what its stream waits for. It takes `operation_us`, and
// `operation_us_per_mib` for each mebibyte that it reads or writes; a copy between host and device or between devices takes
// `copy_us_per_mib` for each mebibyte it copies instead; `_sleep` takes its cycles at kCyclesPerMicrosecond and nothing else.
//
// A launch takes effect, all at once, at the end of its interval: it reads what launches that were complete earlier have written, and
// what it writes is there from its end on. Of all moments in the interval that is the one at which both kinds of race show: a
// reader that ends before its writer does reads stale values, and a reader that ends after an overwriting launch reads what it must
// not. Launches that end at the same moment take effect in the order in which they were enqueued. What a launch writes is there
// for the host once the host's clock is past its end.
//
// Launches that prepare inputs cost nothing and take effect at once.
#pragma once

#include "schedule.h"

#include <cstdint>

namespace sidestream {

struct VirtualCosts {
  double launch_us;
  double operation_us;
  double operation_us_per_mib;
  double copy_us_per_mib;
  double query_us;
};

class VirtualTime final : public Schedule {
 public:
  // A `torch.cuda._sleep` of 2,000 cycles lasts a microsecond: about the rate of an H200 (1,970).
  static constexpr double kCyclesPerMicrosecond = 2000;

  explicit VirtualTime(const VirtualCosts& costs);

  void restart() override;
  // The launch that is complete first, if that is not later than the host's time; a waiting host moves on to it.
  Stream* next(const std::vector<Stream*>& ready, bool host_waits) override;
  void enqueued(Stream& stream, Task& task, const Launch& launch) override;
  void starts(Stream& stream, const Task& task) override;
  void recorded(Recording& recording) override;
  void waited(Stream& stream, const Recording& recording) override;
  void asked() override { host_us_ += costs_.query_us; }
  bool moves_when_asked() const override { return costs_.query_us > 0; }
  bool has_clock() const override { return true; }
  double host_us() const override { return host_us_; }
  double completed_us(const Stream& stream) const override;
  std::vector<std::pair<std::string, double>> report() const override;

 private:
  double end_us(const Stream& stream, const Task& task) const;
  double& ready_us(const Stream& stream);

  const VirtualCosts costs_;
  double host_us_ = 0;
  std::vector<double> ready_us_; // of each stream: when it is through with what it has run
  int64_t steps_ = 0;
};

} // namespace sidestream
