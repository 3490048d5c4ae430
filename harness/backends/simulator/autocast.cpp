#include "autocast.h"

#include "output_metadata.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <utility>

namespace sidestream {
namespace {

constexpr auto kDevice = c10::kPrivateUse1;

bool is_eligible(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone() &&
      value.toTensor().is_floating_point();
}

class WithoutAutocast {
 private:
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::DispatchKey::AutocastPrivateUse1};
};

void cast_arguments(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType dtype) {
  const auto count = op.schema().arguments().size();
  for (auto it = stack->end() - static_cast<std::ptrdiff_t>(count); it != stack->end(); ++it) {
    *it = map_tensors(*it, [&](const at::Tensor& tensor) {
      return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, kDevice) : tensor;
    });
  }
}

void in_lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  WithoutAutocast guard;
  cast_arguments(op, stack, at::autocast::get_lower_precision_fp_from_device_type(kDevice));
  op.callBoxed(stack);
}

void in_float(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  WithoutAutocast guard;
  cast_arguments(op, stack, at::kFloat);
  op.callBoxed(stack);
}

// Asks the operator for float results unless the caller asked for a dtype.
void to_float(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  WithoutAutocast guard;
  const auto& arguments = op.schema().arguments();
  auto first = stack->end() - static_cast<std::ptrdiff_t>(arguments.size());
  if (is_eligible(*first)) {
    for (size_t i = 0; i < arguments.size(); i++) {
      auto& value = *(first + static_cast<std::ptrdiff_t>(i));
      if (arguments[i].name() == "dtype" && value.isNone()) {
        value = at::kFloat;
      }
    }
  }
  op.callBoxed(stack);
}

// Calls the overload that takes a dtype.
template <const char* overload>
void with_dtype(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  WithoutAutocast guard;
  static const auto target = c10::Dispatcher::singleton().findSchemaOrThrow("aten::norm", overload);
  const auto& first = *(stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()));
  auto dtype = is_eligible(first) ? at::kFloat : first.toTensor().scalar_type();
  stack->emplace_back(dtype);
  target.callBoxed(stack);
}

void in_widest(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  WithoutAutocast guard;
  auto dtype = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (tensor.defined()) {
        dtype = at::autocast::prioritize(dtype, tensor, kDevice);
      }
    });
  }
  cast_arguments(op, stack, dtype);
  op.callBoxed(stack);
}

void refuse(const c10::OperatorHandle&, torch::jit::Stack*) {
  TORCH_CHECK(
      false,
      "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; use "
      "binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, or compute it with autocast disabled.");
}

constexpr char kNorm[] = "ScalarOpt_dtype";
constexpr char kNormOfDimensions[] = "ScalarOpt_dim_dtype";
constexpr char kNormOfNames[] = "names_ScalarOpt_dim_dtype";

template <void (*policy)(const c10::OperatorHandle&, torch::jit::Stack*)>
void implement(torch::Library& library, const char* name, const char* overload = "") {
  auto full_name = *overload ? std::string(name) + "." + overload : std::string(name);
  library.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<policy>());
}

} // namespace

void register_autocast() {
  // Leaked: the registrations last as long as the process.
  constexpr auto key = c10::DispatchKey::AutocastPrivateUse1;
  auto* any = new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  any->fallback(torch::CppFunction::makeFallthrough());
  auto& aten = *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  // The macros list names and overloads as tokens.
#define SIDESTREAM_FIRST(name, ...) #name
#define SIDESTREAM_SECOND_OF(name, overload, ...) #overload
#define SIDESTREAM_SECOND(...) SIDESTREAM_SECOND_OF(__VA_ARGS__, , )
#define SIDESTREAM_LOWER(...) implement<in_lower_precision>(aten, SIDESTREAM_FIRST(__VA_ARGS__, ), SIDESTREAM_SECOND(__VA_ARGS__));
#define SIDESTREAM_FLOAT(...) implement<in_float>(aten, SIDESTREAM_FIRST(__VA_ARGS__, ), SIDESTREAM_SECOND(__VA_ARGS__));
#define SIDESTREAM_TO_FLOAT(...) implement<to_float>(aten, SIDESTREAM_FIRST(__VA_ARGS__, ), SIDESTREAM_SECOND(__VA_ARGS__));
#define SIDESTREAM_WIDEST(...) implement<in_widest>(aten, SIDESTREAM_FIRST(__VA_ARGS__, ), SIDESTREAM_SECOND(__VA_ARGS__));
  AT_FORALL_LOWER_PRECISION_FP(SIDESTREAM_LOWER)
  AT_FORALL_FP32(SIDESTREAM_FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIDESTREAM_TO_FLOAT)
  AT_FORALL_PROMOTE(SIDESTREAM_WIDEST)
  implement<with_dtype<kNorm>>(aten, "norm", "Scalar");
  implement<with_dtype<kNormOfDimensions>>(aten, "norm", "ScalarOpt_dim");
  // Named dimensions, as long as torch has them there.
  auto named = c10::Dispatcher::singleton().findSchema({"aten::norm", "names_ScalarOpt_dim"});
  if (named && named->hasKernelForDispatchKey(c10::DispatchKey::AutocastCUDA)) {
    implement<with_dtype<kNormOfNames>>(aten, "norm", "names_ScalarOpt_dim");
  }
  implement<refuse>(aten, "binary_cross_entropy");
}

} // namespace sidestream
