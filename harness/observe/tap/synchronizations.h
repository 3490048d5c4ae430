// The synchronizations of one repetition: every event record, event wait, host synchronization and record_stream that is
// issued through PyTorch's device-generic layer, who issued it, and which one of them is left out.
//
// Independent of how the device is traced: a decorator around whatever guard is registered, so that the same code runs
// on CUDA, where the tap traces, and on the simulator, which traces itself.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "origin.h"
#include "repetition.h"
#include "source_lines.h"

namespace sidestream {

enum class SynchronizationKind : uint8_t { Record, Wait, SynchronizeStream, SynchronizeEvent, SynchronizeDevice, RecordStream };

struct Synchronization {
  SynchronizationKind kind;
  StreamKey on; // the stream that records, waits, is synchronized, or is recorded on a block; the device alone
  const std::string* issuer = nullptr;
  const std::string* node = nullptr; // the autograd node that is running
  SourceLine line;
  Origin origin;
  int64_t index = 0; // among those of the same kind, stream and issuer
  int64_t appearance = 0; // of the stream; see SynchronizationName
  int64_t recorded = -1; // of an event: the position here of the recording that it has
  int64_t entry = -1; // what whoever traces the device calls its entry there
  bool left_out = false;
};

// Which one to leave out, or to get wrong. Never by a global count: the engine has a thread a device.
struct SynchronizationName {
  SynchronizationKind kind;
  StreamKey on;
  std::string issuer;
  int64_t index;
  // Whether `on.stream` is no id but the place of the stream in the order in which those of its device appeared among the
  // synchronizations of the repetition: from 1, and 0 for the default stream. Code that makes its own streams gets others
  // each time, since PyTorch takes them in turn from a pool (c10/cuda/CUDAStream.cpp).
  bool by_appearance = false;
};

enum class Fault : uint8_t {
  None,
  LeaveOut, // the call is not made
  Misdirect, // a wait is made for another event than was asked for, as a broken runtime might
};

// Gives what whoever traces the device calls the entry that this thread added last, or -1, and forgets it.
using TakeLastEntry = int64_t (*)();

class Synchronizations {
 public:
  void set_trace(TakeLastEntry take_last_entry) {
    take_last_entry_ = take_last_entry;
  }
  void begin(std::optional<SynchronizationName> name, Fault fault, bool lines);
  std::vector<Synchronization> finish();
  void set_preparing(bool on);

  bool armed() const {
    return armed_.load(std::memory_order_acquire);
  }

  // Makes `call` unless it is the one to leave out. `issuer` is found out where it is null. `event` identifies the event
  // of a Record, Wait or SynchronizeEvent; `call` may make it. `misdirected`, if any, is called instead of a call that is
  // to go wrong.
  void issue(
      SynchronizationKind kind,
      StreamKey on,
      const std::string* issuer,
      void* const* event,
      const std::function<void()>& call,
      const std::function<void()>& misdirected);

 private:
  // Expects the mutex to be held.
  int64_t appearance_of(StreamKey stream);

  std::atomic<bool> armed_{false};
  std::atomic<int> preparing_{0};
  TakeLastEntry take_last_entry_ = nullptr;

  std::mutex mutex_; // never held while calling into the device or taking the GIL
  std::vector<Synchronization> issued_;
  std::map<std::tuple<SynchronizationKind, int, int64_t, const std::string*>, int64_t> counts_;
  std::map<std::pair<int, int64_t>, int64_t> appearances_; // of streams but for the default ones
  std::map<int, int64_t> appeared_; // how many streams of a device did
  std::unordered_map<void*, int64_t> recordings_; // event -> position of its last Record, -1 if not traced
  std::optional<SynchronizationName> name_;
  Fault fault_ = Fault::None;
  bool lines_ = false;
};

Synchronizations& synchronizations();

// Puts the decorator around the registered guard. Throws c10::Error if the device type has none.
void install_synchronization_guard(c10::DeviceType type);
void remove_synchronization_guard();

} // namespace sidestream
