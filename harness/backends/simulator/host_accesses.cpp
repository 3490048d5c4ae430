#include "host_accesses.h"

#include "host_operators.h"
#include "output_metadata.h"
#include "pinned_memory.h"
#include "scheduler.h"
#include "tensor_memory.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sidestream {
namespace {

// What an operator does with its CPU tensors.
struct HostOperator {
  bool counts = false;
  const std::string* name = nullptr;
  std::vector<bool> written; // one an argument
};

HostOperator make_operator(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  HostOperator result;
  result.name = intern(schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name()));
  for (const auto& argument : schema.arguments()) {
    result.written.push_back(argument.alias_info() && argument.alias_info()->isWrite());
  }
  result.counts = works_on_host_memory(op);
  return result;
}

const HostOperator& operator_of(const c10::OperatorName& name) {
  static auto& known = *new std::unordered_map<c10::OperatorName, HostOperator>();
  static auto& mutex = *new std::mutex();
  std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(name);
  if (found == known.end()) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    found = known.emplace(name, op ? make_operator(*op) : HostOperator()).first;
  }
  return found->second;
}

void add_to_trace(const std::string* operation, const std::vector<Access>& accesses) {
  if (accesses.empty()) {
    return;
  }
  TraceEntry entry{TraceEntry::kHost};
  entry.device = -1;
  entry.stream = -1;
  entry.operation = operation;
  entry.caller = describe_host_access();
  auto& scheduler = Scheduler::get();
  Lock lock(scheduler.mutex);
  if (scheduler.traces()) {
    scheduler.trace.add_with_accesses(entry, accesses);
  }
}

thread_local bool within_operator = false;

// Marks a call that counts, so that what it calls does not.
struct WithinOperator final : at::ObserverContext {};

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  if (within_operator || !Scheduler::get().traces()) {
    return nullptr;
  }
  auto name = function.operator_name();
  if (!name) {
    return nullptr;
  }
  const auto& op = operator_of(*name);
  auto inputs = function.inputs();
  if (!op.counts || inputs.size() != op.written.size()) {
    return nullptr;
  }
  bool is_copy = op.name->rfind("aten::copy_", 0) == 0;
  bool on_device = false;
  std::vector<Access> accesses;
  for (size_t i = 0; i < inputs.size(); i++) {
    for_each_tensor(inputs[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) {
        return;
      }
      on_device = on_device || !tensor.is_cpu();
      if (tensor.is_cpu()) {
        append_accesses(accesses, tensor, op.written[i]);
      }
    });
  }
  if (is_copy && on_device) {
    return nullptr; // copies.cpp knows who reads and who writes
  }
  add_to_trace(op.name, accesses);
  within_operator = true;
  return std::make_unique<WithinOperator>();
}

void on_end(const at::RecordFunction&, at::ObserverContext* context) {
  if (context) {
    within_operator = false;
  }
}

auto& callback_mutex = *new std::mutex();
at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;

} // namespace

OutsideOperator::OutsideOperator() : was_within_(within_operator) {
  within_operator = false;
}

OutsideOperator::~OutsideOperator() {
  within_operator = was_within_;
}

bool observes_host() {
  std::lock_guard<std::mutex> lock(callback_mutex);
  return callback != at::INVALID_CALLBACK_HANDLE;
}

void update_host_observer() {
  std::lock_guard<std::mutex> lock(callback_mutex);
  bool wanted = Scheduler::get().in_repetition() && PinnedAllocator::get().has_live_blocks();
  if (wanted && callback == at::INVALID_CALLBACK_HANDLE) {
    callback = at::addGlobalCallback(
        at::RecordFunctionCallback(on_start, on_end).scopes({at::RecordScope::FUNCTION}).needsInputs(true));
  } else if (!wanted && callback != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(callback);
    callback = at::INVALID_CALLBACK_HANDLE;
  }
}

void trace_host_access(const std::string* operation, const at::Tensor& tensor, bool write) {
  if (!Scheduler::get().traces() || !tensor.is_cpu()) {
    return;
  }
  std::vector<Access> accesses;
  append_accesses(accesses, tensor, write);
  add_to_trace(operation, accesses);
}

} // namespace sidestream
