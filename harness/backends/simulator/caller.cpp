#include "caller.h"

#include "python_frames.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace sidestream {
namespace {

std::atomic<bool> lines_wanted{false};

// Leaked: autograd threads may still enqueue while the process exits.
auto& interned = *new std::unordered_set<std::string>();
auto& intern_mutex = *new std::mutex();

// Lines of forward launches by (thread, sequence number) of the autograd node that was made for them. Backward launches of
// that node are attributed to the same line.
using ForwardKey = std::pair<uint64_t, uint64_t>;
auto& forward_lines = *new std::map<ForwardKey, SourceLine>();
auto& forward_mutex = *new std::mutex();

void set_line(Caller& caller, const SourceLine& line) {
  caller.file = line.file;
  caller.line = line.line;
}

} // namespace

const std::string* intern(const std::string& text) {
  std::lock_guard<std::mutex> lock(intern_mutex);
  return &*interned.insert(text).first;
}

void start_lines(bool wanted) {
  remember_body_thread();
  {
    std::lock_guard<std::mutex> lock(forward_mutex);
    forward_lines.clear();
  }
  lines_wanted = wanted;
}

void stop_lines() {
  lines_wanted = false;
}

Caller describe_line() {
  Caller caller;
  if (lines_wanted) {
    set_line(caller, line_of_this_thread());
    if (!caller.file) {
      set_line(caller, line_of_body_thread());
    }
  }
  return caller;
}

namespace {

Caller describe(bool is_launch) {
  Caller caller;
  auto node = torch::autograd::get_current_node();
  if (node) {
    caller.node = intern(node->name());
  }
  if (!lines_wanted) {
    return caller;
  }
  if (!node) {
    caller = describe_line();
    // The node of this forward operation was made just before, so the last sequence number given out is its own.
    auto sequence = at::sequence_number::peek();
    if (is_launch && caller.file && sequence > 0) {
      std::lock_guard<std::mutex> lock(forward_mutex);
      // Only the first launch since the node was made belongs to it for sure.
      forward_lines.emplace(
          ForwardKey(at::RecordFunction::currentThreadId(), sequence - 1), SourceLine{caller.file, caller.line});
    }
    return caller;
  }
  if (!is_body_thread()) {
    // Python code on a backward thread is the backward of a custom Function: its own line says most.
    set_line(caller, line_of_this_thread());
  }
  if (!caller.file) {
    std::lock_guard<std::mutex> lock(forward_mutex);
    auto found = forward_lines.find(ForwardKey(node->thread_id(), node->sequence_nr()));
    if (found != forward_lines.end()) {
      set_line(caller, found->second);
    }
  }
  if (!caller.file) {
    set_line(caller, line_of_body_thread());
  }
  return caller;
}

} // namespace

Caller describe_launch() {
  auto caller = describe(true);
  caller.origin = Origin::now();
  return caller;
}

Caller describe_host_access() {
  return describe(false);
}

} // namespace sidestream
