// Submission order: a launch runs when it is enqueued, unless a hold, or what it has to wait for, keeps it. It is the order that
// happens-before asks for at least (Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System", CACM 1978) with
// nothing reordered; a hold then lets one access overtake another, as the delays of Musuvathi et al. do ("Finding and Reproducing
// Heisenbugs in Concurrent Programs", OSDI 2008), but exactly.
#pragma once

#include "schedule.h"

namespace sidestream {

class SubmissionOrder final : public Schedule {
 public:
  bool runs_at_once() const override { return true; }
  // The launch that was enqueued first.
  Stream* next(const std::vector<Stream*>& ready, bool host_waits) override;
};

} // namespace sidestream
