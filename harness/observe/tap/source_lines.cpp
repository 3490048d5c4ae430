#include <Python.h>

#include "source_lines.h"

#include <torch/csrc/autograd/function.h>

#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace sidestream {
namespace {

// Everything here is leaked on purpose: the engine's threads may outlive the process' static objects.

struct Files {
  std::mutex mutex;
  std::map<std::string, int32_t, std::less<>> numbers; // negative: never the caller's
  std::vector<std::string> names;
  std::vector<std::string> ignored_prefixes;
};

Files& files() {
  static auto* const instance = new Files;
  return *instance;
}

struct PairHash {
  size_t operator()(const std::pair<uint64_t, uint64_t>& key) const {
    return std::hash<uint64_t>()(key.second * 0x9E3779B97F4A7C15ull + key.first);
  }
};

struct ForwardLines {
  std::mutex mutex;
  std::unordered_map<std::pair<uint64_t, uint64_t>, SourceLine, PairHash> lines;
};

ForwardLines& forward_lines() {
  static auto* const instance = new ForwardLines;
  return *instance;
}

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() {
    PyGILState_Release(state_);
  }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

bool python_is_running() {
  return Py_IsInitialized() != 0;
}

// The number of a file, or -1 if its code is never the caller's.
int32_t number_of_callers_file(const char* name) {
  auto& table = files();
  const std::lock_guard lock(table.mutex);
  const auto found = table.numbers.find(name);
  if (found != table.numbers.end()) {
    return found->second;
  }
  int32_t number = static_cast<int32_t>(table.names.size());
  if (std::strncmp(name, "<frozen ", 8) == 0) {
    number = -1;
  }
  for (const auto& prefix : table.ignored_prefixes) {
    if (std::strncmp(name, prefix.c_str(), prefix.size()) == 0) {
      number = -1;
    }
  }
  table.numbers.emplace(name, number);
  if (number >= 0) {
    table.names.emplace_back(name);
  }
  return number;
}

struct Walk {
  SourceLine line;
  bool left_backward = false; // the walk passed the call of the engine before it found the line
};

// Walks outwards from `frame` (a new reference, or null) to the first line of the caller's code. The GIL is held.
Walk walk(PyFrameObject* frame) {
  Walk result;
  while (frame != nullptr) {
    PyCodeObject* const code = PyFrame_GetCode(frame);
    const char* const name = PyUnicode_AsUTF8(code->co_filename);
    if (name == nullptr) {
      PyErr_Clear();
    } else {
      const auto file = number_of_callers_file(name);
      if (file >= 0) {
        result.line = {file, PyFrame_GetLineNumber(frame)};
      } else if (PyUnicode_CompareWithASCIIString(code->co_name, "_engine_run_backward") == 0) {
        result.left_backward = true; // torch/autograd/graph.py
      }
    }
    Py_DECREF(code);
    PyFrameObject* const outer = result.line.known() ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  return result;
}

Walk walk_this_thread() {
  PyFrameObject* const frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  return walk(frame);
}

SourceLine forward_line(uint64_t forward_thread, uint64_t sequence_number) {
  auto& known = forward_lines();
  const std::lock_guard lock(known.mutex);
  const auto found = known.lines.find({forward_thread, sequence_number});
  return found == known.lines.end() ? SourceLine{} : found->second;
}

// Where backward was called, if exactly one thread is inside a call of it. The GIL is held.
SourceLine line_that_called_backward() {
  SourceLine found;
  auto* const interpreter = PyInterpreterState_Get();
  for (auto* thread = PyInterpreterState_ThreadHead(interpreter); thread != nullptr;
       thread = PyThreadState_Next(thread)) {
    const auto walked = walk(PyThreadState_GetFrame(thread));
    if (walked.left_backward && walked.line.known()) {
      if (found.known()) {
        return {};
      }
      found = walked.line;
    }
  }
  return found;
}

} // namespace

std::string file_name(int32_t file) {
  auto& table = files();
  const std::lock_guard lock(table.mutex);
  return table.names.at(static_cast<size_t>(file));
}

void set_ignored_prefixes(std::vector<std::string> prefixes) {
  auto& table = files();
  const std::lock_guard lock(table.mutex);
  table.ignored_prefixes = std::move(prefixes);
  // Files are numbered anew, so that each is judged by the new prefixes; the old numbers keep their names.
  table.numbers.clear();
}

SourceLine current_line() {
  if (!python_is_running()) {
    return {};
  }
  const Gil gil;
  return walk_this_thread().line;
}

SourceLine line_in_backward(uint64_t forward_thread, uint64_t sequence_number) {
  if (!python_is_running()) {
    return {};
  }
  const auto forward = forward_line(forward_thread, sequence_number);
  const Gil gil;
  const auto here = walk_this_thread();
  if (here.line.known() && !here.left_backward) {
    return here.line;
  }
  if (forward.known()) {
    return forward;
  }
  return here.line.known() ? here.line : line_that_called_backward();
}

SourceLine line_without_taking_the_gil() {
  if (!python_is_running()) {
    return {};
  }
  SourceLine here;
  if (PyGILState_Check() != 0) {
    const auto walked = walk_this_thread();
    here = walked.line;
    if (here.known() && !walked.left_backward) {
      return here;
    }
  }
  if (const auto node = torch::autograd::get_current_node()) {
    const auto forward = forward_line(node->thread_id(), node->sequence_nr());
    return forward.known() ? forward : here;
  }
  return here;
}

void note_forward_line(uint64_t forward_thread, uint64_t sequence_number, SourceLine line) {
  auto& known = forward_lines();
  const std::lock_guard lock(known.mutex);
  // The latest wins: an operation that makes no node leaves its sequence number to the next one.
  known.lines[{forward_thread, sequence_number}] = line;
}

void forget_forward_lines() {
  auto& known = forward_lines();
  const std::lock_guard lock(known.mutex);
  known.lines.clear();
}

} // namespace sidestream
