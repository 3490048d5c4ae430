#include "synchronizations.h"

#include <torch/csrc/autograd/function.h>

#include <stdexcept>
#include <utility>

#include "issuer.h"
#include "operations.h"
#include "thread_state.h"

namespace sidestream {

Synchronizations& synchronizations() {
  static auto* const instance = new Synchronizations; // leaked: the engine's threads may outlive static objects
  return *instance;
}

void Synchronizations::begin(std::optional<SynchronizationName> name, Fault fault, bool lines) {
  const std::lock_guard lock(mutex_);
  issued_.clear();
  counts_.clear();
  appearances_.clear();
  appeared_.clear();
  recordings_.clear();
  name_ = std::move(name);
  fault_ = fault;
  lines_ = lines;
  preparing_ = 0;
  armed_.store(true, std::memory_order_release);
}

std::vector<Synchronization> Synchronizations::finish() {
  armed_.store(false, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  return std::move(issued_);
}

int64_t Synchronizations::appearance_of(StreamKey stream) {
  if (stream.stream == 0) {
    return 0;
  }
  const auto [place, is_new] = appearances_.try_emplace({stream.device, stream.stream}, 0);
  if (is_new) {
    place->second = ++appeared_[stream.device];
  }
  return place->second;
}

void Synchronizations::set_preparing(bool on) {
  preparing_ += on ? 1 : -1;
}

void Synchronizations::issue(
    SynchronizationKind kind,
    StreamKey on,
    const std::string* issuer,
    void* const* event,
    const std::function<void()>& call,
    const std::function<void()>& misdirected) {
  if (this_thread().ignored || preparing_.load(std::memory_order_relaxed) > 0) {
    call();
    if (kind == SynchronizationKind::Record) {
      // What the event was before, at this address, is over.
      const std::lock_guard lock(mutex_);
      recordings_.erase(*event);
    }
    return;
  }
  Synchronization made{kind, on};
  made.origin = Origin::now();
  made.issuer = issuer != nullptr ? issuer : current_issuer();
  if (const auto node = torch::autograd::get_current_node()) {
    made.node = interned(node->name());
  }
  const bool of_event = kind == SynchronizationKind::Wait || kind == SynchronizationKind::SynchronizeEvent;
  Fault fault = Fault::None;
  {
    const std::lock_guard lock(mutex_);
    if (of_event) {
      const auto found = recordings_.find(*event);
      if (found != recordings_.end()) {
        made.recorded = found->second;
        if (kind == SynchronizationKind::SynchronizeEvent) {
          made.on = issued_[made.recorded].on;
        }
      }
    }
    made.index = counts_[{kind, made.on.device, made.on.stream, made.issuer}]++;
    made.appearance = appearance_of(made.on);
    if (name_.has_value() && name_->kind == kind && name_->on.device == made.on.device &&
        name_->on.stream == (name_->by_appearance ? made.appearance : made.on.stream) && name_->index == made.index &&
        name_->issuer == *made.issuer) {
      fault = fault_;
    }
  }
  if (lines_) {
    made.line = current_line();
  }
  made.left_out = fault == Fault::LeaveOut;
  if (!made.left_out) {
    if (take_last_entry_ != nullptr) {
      take_last_entry_();
    }
    if (fault == Fault::Misdirect && !misdirected) {
      throw std::runtime_error("of all synchronizations, only the wait for an event can be misdirected");
    }
    (fault == Fault::Misdirect ? misdirected : call)();
    if (take_last_entry_ != nullptr) {
      made.entry = take_last_entry_();
    }
  }
  const std::lock_guard lock(mutex_);
  if (kind == SynchronizationKind::Record) {
    recordings_[*event] = static_cast<int64_t>(issued_.size());
  }
  issued_.push_back(std::move(made));
}

} // namespace sidestream
