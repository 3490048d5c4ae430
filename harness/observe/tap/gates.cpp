#include "gates.h"

#include <dlfcn.h>
#include <signal.h>

#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "device.h"

namespace sidestream {
namespace {

// The CUDA driver's API (cuda.h) and runtime (cuda_runtime_api.h), called by address so that this extension needs no CUDA to be
// built.
using WaitValue = int (*)(void* stream, unsigned long long address, uint32_t value, unsigned int flags);
using AllocateHost = int (*)(void** pointer, size_t size_bytes, unsigned int flags);
using DevicePointer = int (*)(void** device, void* host, unsigned int flags);

constexpr unsigned int kGreaterOrEqual = 0; // CU_STREAM_WAIT_VALUE_GEQ: of a difference, so that the value may wrap around
constexpr unsigned int kPortableAndMapped = 0x01 | 0x02; // cudaHostAllocPortable: for the contexts of all devices
constexpr int kNotSupported = 801; // CUDA_ERROR_NOT_SUPPORTED
constexpr size_t kWordsAtOnce = 1024;
constexpr auto kWatchInterval = std::chrono::milliseconds(20);

struct Driver {
  WaitValue wait_value = nullptr;
  AllocateHost allocate_host = nullptr;
  DevicePointer device_pointer = nullptr;
};

Driver driver;

void* symbol_of_driver(const char* name) {
  // Loaded by torch; its handle is never closed, so that it stays.
  static void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr : dlsym(library, name);
}

void check(int error, const char* what) {
  if (error == kNotSupported) {
    throw std::runtime_error(std::string(what) + " is not supported by this device or driver");
  }
  if (error != 0) {
    throw std::runtime_error(std::string(what) + " failed with error " + std::to_string(error));
  }
}

} // namespace

Gates& gates() {
  static auto* const instance = new Gates; // leaked: its thread may outlive static objects
  return *instance;
}

void Gates::find_driver() {
  Driver found;
  // Since CUDA 12 the old name is that of a version which has to be switched on in the kernel's module.
  for (const char* const name : {"cuStreamWaitValue32_v2", "cuStreamWaitValue32"}) {
    if (found.wait_value == nullptr) {
      found.wait_value = reinterpret_cast<WaitValue>(symbol_of_driver(name));
    }
  }
  found.allocate_host = reinterpret_cast<AllocateHost>(find_in("libc10_cuda.so", "cudaHostAlloc"));
  found.device_pointer = reinterpret_cast<DevicePointer>(find_in("libc10_cuda.so", "cudaHostGetDevicePointer"));
  if (found.wait_value == nullptr) {
    throw std::runtime_error("the CUDA driver has no cuStreamWaitValue32");
  }
  if (found.allocate_host == nullptr || found.device_pointer == nullptr || !(has_native_streams() || find_fill())) {
    throw std::runtime_error("this build of torch exports neither the CUDA runtime nor its streams");
  }
  driver = found;
}

void Gates::use(Clock::duration limit, Wait wait) {
  stop_using();
  const bool on_device = !wait;
  if (on_device) {
    find_driver();
    wait = [](const c10::Stream& stream, uint64_t address, uint32_t value) {
      check(driver.wait_value(native_stream(stream), address, value, kGreaterOrEqual), "cuStreamWaitValue32");
    };
  }
  {
    const std::lock_guard lock(mutex_);
    if (on_device != on_device_) {
      words_.clear();
      spare_words_.clear();
    }
    on_device_ = on_device;
    wait_ = std::move(wait);
    limit_ = limit;
    value_ = 0;
    opens_at_.reset();
    expired_ = false;
  }
  if (on_device) {
    // Whether it works is told by doing it: the first gate of no repetition is open.
    begin(1);
    open_all();
    const auto stream = device_guard()->getStream(device_guard()->getDevice());
    wait_(stream, words_.front().device, value_);
    device_guard()->synchronizeStream(stream);
  }
  const std::lock_guard lock(mutex_);
  if (!is_watched_) {
    is_watched_ = true;
    std::thread([this] { watch(); }).detach();
  }
  in_use_ = true;
  changed_.notify_all();
}

void Gates::stop_using() {
  open_all();
  in_use_ = false;
}

// Expects nobody else to begin.
Gates::Word Gates::new_word() {
  if (spare_words_.empty()) {
    constexpr size_t size_bytes = kWordsAtOnce * sizeof(uint32_t);
    void* host = nullptr;
    void* device = nullptr;
    if (on_device_) {
      check(driver.allocate_host(&host, size_bytes, kPortableAndMapped), "cudaHostAlloc");
      check(driver.device_pointer(&device, host, 0), "cudaHostGetDevicePointer");
    } else {
      host = device = std::malloc(size_bytes);
      if (host == nullptr) {
        throw std::bad_alloc();
      }
    }
    for (size_t i = 0; i < kWordsAtOnce; ++i) {
      spare_words_.push_back({static_cast<uint32_t*>(host) + i,
                              reinterpret_cast<uint64_t>(static_cast<uint32_t*>(device) + i)});
    }
  }
  const auto word = spare_words_.back();
  spare_words_.pop_back();
  return word;
}

void Gates::begin(size_t count) {
  std::vector<Word> added;
  while (words_.size() + added.size() < count) {
    added.push_back(new_word());
  }
  const std::lock_guard lock(mutex_);
  for (const auto& word : added) {
    __atomic_store_n(word.host, value_, __ATOMIC_SEQ_CST);
    words_.push_back(word);
  }
  write_all();
  ++value_;
  count_ = count;
  opens_at_.reset();
  expired_ = false;
}

void Gates::enqueue_wait(size_t position, const c10::Stream& stream) {
  Word word{};
  uint32_t value = 0;
  {
    const std::lock_guard lock(mutex_);
    if (position >= count_) {
      return; // of a repetition that is over
    }
    word = words_[position];
    value = value_;
    if (!opens_at_.has_value() && !expired_) {
      opens_at_ = Clock::now() + limit_;
    }
  }
  wait_(stream, word.device, value);
}

void Gates::write(size_t position) {
  __atomic_store_n(words_[position].host, value_, __ATOMIC_SEQ_CST);
}

void Gates::write_all() {
  // Those beyond this repetition's as well, so that no word is ever so old that its difference wraps around.
  for (size_t position = 0; position < words_.size(); ++position) {
    write(position);
  }
}

void Gates::open(size_t position) {
  const std::lock_guard lock(mutex_);
  if (position < count_) {
    write(position);
  }
}

void Gates::open_all() {
  const std::lock_guard lock(mutex_);
  write_all();
  opens_at_.reset();
}

bool Gates::is_open(size_t position) {
  const std::lock_guard lock(mutex_);
  return position >= count_ || *words_[position].host == value_;
}

void Gates::watch() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr); // signals are for the threads of Python
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return in_use(); });
    if (opens_at_.has_value() && Clock::now() >= *opens_at_) {
      expired_.store(true, std::memory_order_release);
      write_all();
      opens_at_.reset();
    }
    // Rather than being woken up in every repetition.
    changed_.wait_for(lock, kWatchInterval);
  }
}

} // namespace sidestream
