#include "output_metadata.h"

#include "python_errors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/record_function.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>
#include <iterator>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace sidestream {
namespace {

constexpr size_t kMostSignatures = 1 << 14;

// A call signature as numbers: all that output metadata may depend on.
class Signature {
 public:
  std::vector<int64_t> numbers;

  // False where the value has a part that cannot be written down.
  bool add(const c10::IValue& value, bool with_offset) {
    if (value.isNone()) {
      numbers.push_back('N');
    } else if (value.isTensor()) {
      return add_tensor(value.toTensor(), with_offset);
    } else if (value.isInt()) {
      add_tagged('i', value.toInt());
    } else if (value.isDouble()) {
      add_tagged('d', bits(value.toDouble()));
    } else if (value.isBool()) {
      add_tagged('b', value.toBool());
    } else if (value.isComplexDouble()) {
      add_tagged('c', bits(value.toComplexDouble().real()));
      numbers.push_back(bits(value.toComplexDouble().imag()));
    } else if (value.isDevice()) {
      add_tagged('D', static_cast<int64_t>(value.toDevice().type()));
      numbers.push_back(value.toDevice().index());
    } else if (value.isString()) {
      const auto& text = value.toStringRef();
      add_tagged('s', static_cast<int64_t>(text.size()));
      numbers.insert(numbers.end(), text.begin(), text.end());
    } else if (value.isGenerator()) {
      numbers.push_back('N'); // as if there were none: shapes do not depend on it
    } else if (value.isList()) {
      const auto elements = value.toListRef();
      add_tagged('l', static_cast<int64_t>(elements.size()));
      for (const auto& element : elements) {
        if (!add(element, with_offset)) {
          return false;
        }
      }
    } else {
      return false;
    }
    return true;
  }

 private:
  static int64_t bits(double value) {
    int64_t result;
    std::memcpy(&result, &value, sizeof(result));
    return result;
  }

  void add_tagged(char tag, int64_t number) {
    numbers.push_back(tag);
    numbers.push_back(number);
  }

  bool add_tensor(const at::Tensor& tensor, bool with_offset) {
    if (!tensor.defined()) {
      numbers.push_back('U');
      return true;
    }
    if (tensor.layout() != c10::kStrided) {
      return false;
    }
    numbers.push_back('T');
    int64_t flags = tensor.unsafeGetTensorImpl()->is_wrapped_number() | tensor.is_conj() << 1 | tensor.is_neg() << 2 |
        tensor.device().is_cpu() << 3;
    numbers.push_back(static_cast<int64_t>(tensor.scalar_type()) | flags << 8 | tensor.dim() << 16);
    numbers.insert(numbers.end(), tensor.sizes().begin(), tensor.sizes().end());
    numbers.insert(numbers.end(), tensor.strides().begin(), tensor.strides().end());
    if (with_offset) {
      numbers.push_back(tensor.storage_offset());
      numbers.push_back(static_cast<int64_t>(tensor.storage().nbytes()));
    }
    return true;
  }
};

struct SignatureHash {
  size_t operator()(const std::vector<int64_t>& numbers) const {
    uint64_t hash = 0xcbf29ce484222325;
    for (auto number : numbers) {
      hash = (hash ^ static_cast<uint64_t>(number)) * 0x100000001b3;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

auto& cache_mutex = *new std::mutex();
auto& cache = *new std::unordered_map<std::vector<int64_t>, OutputMetadataPointer, SignatureHash>();

// A meta tensor that looks like the given one. Views need the whole storage and the place in it.
at::Tensor to_meta(const at::Tensor& tensor, bool with_offset) {
  if (!tensor.defined() || tensor.is_cpu()) {
    return tensor; // a number that came as a tensor: kernels in Python want to read it
  }
  at::Tensor meta;
  if (with_offset) {
    auto items = static_cast<int64_t>(tensor.storage().nbytes() / tensor.element_size());
    meta = at::detail::empty_strided_meta({items}, {1}, tensor.scalar_type());
    meta.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  } else {
    meta = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  }
  meta._set_conj(tensor.is_conj());
  meta._set_neg(tensor.is_neg());
  return meta;
}

thread_local bool in_meta_kernel = false;

class InMetaKernel {
 public:
  InMetaKernel() { in_meta_kernel = true; }
  ~InMetaKernel() { in_meta_kernel = outer_; }
  InMetaKernel(const InMetaKernel&) = delete;
  InMetaKernel& operator=(const InMetaKernel&) = delete;

 private:
  bool outer_ = in_meta_kernel;
};

OutputMetadataPointer run_meta_kernel(
    const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const std::vector<bool>& written, bool is_view) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    return nullptr;
  }
  std::vector<std::pair<const c10::TensorImpl*, at::Tensor>> known;
  auto meta_of = [&](const at::Tensor& tensor) {
    for (const auto& [impl, meta] : known) {
      if (impl == tensor.unsafeGetTensorImpl()) {
        return meta;
      }
    }
    known.emplace_back(tensor.unsafeGetTensorImpl(), to_meta(tensor, is_view));
    return known.back().second;
  };
  torch::jit::Stack stack;
  for (const auto& argument : arguments) {
    if (argument.isDevice()) {
      stack.emplace_back(c10::Device(c10::kMeta));
    } else if (argument.isGenerator()) {
      stack.emplace_back();
    } else {
      stack.push_back(map_tensors(argument, meta_of));
    }
  }
  torch::jit::Stack meta_arguments = stack;
  try {
    BackendsOnly guard;
    InMetaKernel in_kernel;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const c10::NotImplementedError&) {
    return nullptr;
  } catch (const std::exception& error) {
    if (is_python_not_implemented(error)) {
      return nullptr;
    }
    throw;
  }
  auto result = std::make_shared<OutputMetadata>();
  for (const auto& value : stack) {
    result->returns.emplace_back();
    for_each_tensor(value, [&](const at::Tensor& tensor) { result->returns.back().push_back(TensorMetadata::of(tensor)); });
  }
  for (size_t i = 0; i < meta_arguments.size(); i++) {
    result->written.emplace_back();
    if (written[i]) {
      for_each_tensor(meta_arguments[i], [&](const at::Tensor& tensor) {
        result->written.back().push_back(TensorMetadata::of(tensor));
      });
    }
  }
  return result;
}

} // namespace

struct BackendsOnly::Guards {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect), // picks the backend of factory functions
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  at::DisableRecordFunctionGuard observers;
};

BackendsOnly::BackendsOnly() : guards_(std::make_unique<Guards>()) {}

BackendsOnly::~BackendsOnly() = default;

TensorMetadata TensorMetadata::of(const at::Tensor& tensor) {
  TensorMetadata result;
  if (tensor.defined()) {
    result.defined = true;
    result.sizes = tensor.sizes().vec();
    result.strides = tensor.strides().vec();
    result.storage_offset = tensor.storage_offset();
    result.dtype = tensor.scalar_type();
    result.conjugate = tensor.is_conj();
    result.negative = tensor.is_neg();
  }
  return result;
}

OutputMetadataPointer output_metadata(
    const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const std::vector<bool>& written, bool is_view) {
  thread_local Signature signature; // kept for its memory
  auto& numbers = signature.numbers;
  numbers.clear();
  numbers.push_back(reinterpret_cast<intptr_t>(&op.schema()));
  numbers.push_back(static_cast<int64_t>(c10::get_default_dtype_as_scalartype()));
  bool writable = true;
  for (const auto& argument : arguments) {
    writable = writable && signature.add(argument, is_view);
  }
  if (!writable) {
    return run_meta_kernel(op, arguments, written, is_view);
  }
  {
    std::lock_guard<std::mutex> lock(cache_mutex);
    auto found = cache.find(numbers);
    if (found != cache.end()) {
      return found->second;
    }
  }
  // The meta kernel may call operators of the simulator's, and so this function.
  auto key = numbers;
  auto result = run_meta_kernel(op, arguments, written, is_view);
  std::lock_guard<std::mutex> lock(cache_mutex);
  if (cache.size() >= kMostSignatures) {
    cache.clear();
  }
  return cache.emplace(std::move(key), std::move(result)).first->second;
}

bool runs_meta_kernel() {
  return in_meta_kernel;
}

size_t metadata_cache_size() {
  std::lock_guard<std::mutex> lock(cache_mutex);
  return cache.size();
}

void forget_metadata(const c10::FunctionSchema& schema) {
  const auto of_operator = reinterpret_cast<intptr_t>(&schema); // the first number of a signature
  std::lock_guard<std::mutex> lock(cache_mutex);
  for (auto entry = cache.begin(); entry != cache.end();) {
    entry = entry->first.front() == of_operator ? cache.erase(entry) : std::next(entry);
  }
}

} // namespace sidestream
