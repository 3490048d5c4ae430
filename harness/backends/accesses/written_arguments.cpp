#include "written_arguments.h"

#include <algorithm>
#include <array>
#include <string>

namespace sidestream {

bool WrittenArguments::has(size_t position, c10::ArrayRef<c10::IValue> call) const {
  if (statistics[position]) {
    return training < 0 || call[static_cast<size_t>(training)].toBool();
  }
  return by_schema[position];
}

WrittenArguments written_arguments_of(const c10::FunctionSchema& schema) {
  static constexpr std::array readers = {"backward", "no_training", "no_update", "functional"}; // of running statistics
  const auto& name = schema.name();
  const bool reads =
      std::any_of(readers.begin(), readers.end(), [&](const char* part) { return name.find(part) != std::string::npos; });
  WrittenArguments written;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    written.by_schema.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    written.statistics.push_back(!reads && (argument.name() == "running_mean" || argument.name() == "running_var"));
    if (argument.name() == "training" || argument.name() == "train") {
      written.training = static_cast<int>(i);
    }
  }
  return written;
}

} // namespace sidestream
