#include "issuer.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "operations.h"

namespace sidestream {
namespace {

constexpr int kMostFrames = 48;

enum class Kind : uint8_t {
  Unknown, // says nothing: the tap itself, or a function without a symbol
  Plumbing, // of the device-generic layer, between the issuer and the tap
  Nameless, // in PyTorch's library, without a symbol
  Python, // the interpreter, or PyTorch's Python bindings
  Engine, // the loop of the engine: whatever is inside without a symbol belongs to it
  Function, // any other function of PyTorch, which is the issuer
};

struct Frame {
  Kind kind = Kind::Unknown;
  const std::string* name = nullptr;
};

bool starts_with(const std::string& text, const char* prefix) {
  return text.compare(0, std::strlen(prefix), prefix) == 0;
}

bool contains(const char* text, const char* part) {
  return text != nullptr && std::strstr(text, part) != nullptr;
}

std::string demangled(const char* symbol) {
  int status = 0;
  char* const text = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
  const std::string name = status == 0 && text != nullptr ? text : symbol;
  std::free(text);
  return name;
}

// "torch::autograd::InputBuffer::add(unsigned long, ...)" -> "InputBuffer::add".
std::string short_name(std::string name) {
  int depth = 0;
  for (size_t i = 0; i < name.size(); ++i) {
    depth += name[i] == '<' ? 1 : name[i] == '>' ? -1 : 0;
    if (name[i] == '(' && depth == 0 && i > 0) {
      name.resize(i);
      break;
    }
  }
  const auto space = name.rfind(' ');
  if (space != std::string::npos && name.find('<') == std::string::npos) {
    name.erase(0, space + 1); // the return type of a template
  }
  for (const char* const prefix : {"torch::autograd::", "torch::", "c10::", "at::"}) {
    if (starts_with(name, prefix)) {
      return name.substr(std::strlen(prefix));
    }
  }
  return name;
}

Frame look_at(void* address) {
  Dl_info info;
  if (dladdr(address, &info) == 0) {
    return {};
  }
  static const void* const here = [] {
    Dl_info own;
    return dladdr(reinterpret_cast<void*>(&current_issuer), &own) != 0 ? own.dli_fbase : nullptr;
  }();
  if (info.dli_fbase == here) {
    return {};
  }
  if (contains(info.dli_fname, "torch_python") || contains(info.dli_fname, "/_C.")) {
    // Between the engine and its threads there is one frame of this library; a walk never comes that far.
    const auto name = info.dli_sname == nullptr ? std::string() : demangled(info.dli_sname);
    if (starts_with(name, "torch::autograd::") && !starts_with(name, "torch::autograd::THP")) {
      return {Kind::Plumbing, nullptr}; // PyNode, PyFunctionPreHook: what they call decides
    }
    return {Kind::Python, nullptr};
  }
  const bool in_torch = contains(info.dli_fname, "libtorch") || contains(info.dli_fname, "libc10");
  if (info.dli_sname == nullptr) {
    return {in_torch ? Kind::Nameless : Kind::Unknown, nullptr};
  }
  const char* const symbol = info.dli_sname;
  if (starts_with(symbol, "_Py") || starts_with(symbol, "Py")) {
    return {Kind::Python, nullptr};
  }
  if (!in_torch) {
    return {};
  }
  const auto name = demangled(symbol);
  if (contains(name.c_str(), "c10::impl::Inline") || contains(name.c_str(), "c10::impl::Virtual") ||
      starts_with(name, "c10::Event") || starts_with(name, "c10::Stream") || starts_with(name, "at::accelerator::")) {
    return {Kind::Plumbing, nullptr};
  }
  if (starts_with(name, "torch::autograd::Engine::thread_") || starts_with(name, "torch::autograd::Engine::execute") ||
      starts_with(name, "torch::autograd::Engine::reentrant_")) {
    return {Kind::Engine, nullptr};
  }
  return {Kind::Function, interned(short_name(name))};
}

Frame frame_at(void* address) {
  static auto* const mutex = new std::mutex;
  static auto* const known = new std::unordered_map<void*, Frame>;
  {
    const std::lock_guard lock(*mutex);
    const auto found = known->find(address);
    if (found != known->end()) {
      return found->second;
    }
  }
  const auto frame = look_at(address);
  const std::lock_guard lock(*mutex);
  return known->emplace(address, frame).first->second;
}

} // namespace

const std::string* user_issuer() {
  static const auto* const name = interned("user");
  return name;
}

const std::string* current_issuer() {
  // GraphTask's functions are hidden: the only ones of the engine that synchronize streams from its loop itself.
  static const auto* const post_processing = interned("GraphTask::exec_post_processing");
  static const auto* const unknown = interned("unknown");
  void* addresses[kMostFrames];
  const int count = backtrace(addresses, kMostFrames);
  bool nameless = false;
  for (int i = 0; i < count; ++i) {
    const auto frame = frame_at(addresses[i]);
    switch (frame.kind) {
      case Kind::Function:
        return frame.name;
      case Kind::Python:
        return user_issuer();
      case Kind::Engine:
        return post_processing;
      case Kind::Nameless:
        nameless = true;
        break;
      case Kind::Unknown:
      case Kind::Plumbing:
        break;
    }
  }
  return nameless ? unknown : user_issuer();
}

} // namespace sidestream
