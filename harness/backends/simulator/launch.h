// Any operator as a launch: shapes and errors from its meta kernel when it is enqueued, values from its CPU kernel on the same
// memory when the scheduler reaches it.
#pragma once

#include "scheduler.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sidestream {

// The boxed kernel of every operator that has no kernel of its own in operators.cpp.
void launch_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Forgets what is known of operators whose libraries are destroyed. Once a process.
void watch_operators();

// A fresh tensor on the current stream of a device.
at::Tensor empty_on_device(c10::DeviceIndex device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// Enqueues on the current stream of a device.
void submit(c10::DeviceIndex device, Launch launch);

} // namespace sidestream
