// Gates: words in the host's memory, each of which a stream waits for until the host opens it.
//
// A closed gate keeps its stream waiting for as long as nobody opens it, so a thread of the gates' own, which needs
// neither the GIL nor the device, opens what has been closed for too long.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

namespace sidestream {

class Gates {
 public:
  using Clock = std::chrono::steady_clock;
  // Enqueues on the stream that it waits until the word at this address of the device is `value`, or has passed it.
  using Wait = std::function<void(const c10::Stream& stream, uint64_t address, uint32_t value)>;

  // From now on holds are gates. The driver's own wait, or `wait` on ordinary memory of the host if that is given.
  // Throws std::runtime_error, with the reason, where streams cannot wait for a word.
  void use(Clock::duration limit, Wait wait);
  // From now on they are not; opens what is closed.
  void stop_using();
  bool in_use() const {
    return in_use_.load(std::memory_order_relaxed);
  }

  // All gates of the repetition before are open, those of the new one closed. Called while nothing runs.
  void begin(size_t count);
  // Lets the stream wait for a gate. It does not wait if the gate has been opened before.
  void enqueue_wait(size_t position, const c10::Stream& stream);
  void open(size_t position);
  void open_all();
  bool is_open(size_t position);
  // Whether a gate of this repetition had to be opened because its time was up.
  bool expired() const {
    return expired_.load(std::memory_order_acquire);
  }

 private:
  struct Word {
    uint32_t* host;
    uint64_t device;
  };

  void find_driver();
  Word new_word();
  void watch();
  // These two expect the mutex to be held.
  void write(size_t position);
  void write_all();

  std::atomic<bool> in_use_{false};
  std::atomic<bool> expired_{false};

  std::mutex mutex_; // never held while calling into the device or taking the GIL
  std::condition_variable changed_;
  Wait wait_;
  bool on_device_ = false; // whether the words must be memory that the device reaches
  std::vector<Word> words_; // never freed: a stream may still be waiting for them
  std::vector<Word> spare_words_;
  size_t count_ = 0;
  uint32_t value_ = 0; // of the open gates of this repetition; closed ones have an older one
  Clock::duration limit_{};
  std::optional<Clock::time_point> opens_at_; // none while no stream waits
  bool is_watched_ = false;
};

Gates& gates();

} // namespace sidestream
