#include "recurrent_cells.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>

// The formulas of aten/src/ATen/native/cuda/RNN.cu in PyTorch.
namespace sidestream {
namespace {

using at::Tensor;
using Bias = std::optional<Tensor>;

Tensor joined(std::initializer_list<Tensor> gates) {
  return at::cat(at::TensorList(gates), 1);
}

Tensor with_bias(const Tensor& gates, const Bias& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const Bias& input_bias, const Bias& hidden_bias) {
  auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  auto input = gates[0].sigmoid();
  auto forget = gates[1].sigmoid();
  auto cell = gates[2].tanh();
  auto output = gates[3].sigmoid();
  auto cy = forget * cx + input * cell;
  auto hy = output * cy.tanh();
  return {hy, cy, joined({input, forget, cell, output})};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& grad_hy,
    const std::optional<Tensor>& grad_cy,
    const Tensor& cx,
    const Tensor& cy,
    const Tensor& workspace,
    bool has_bias) {
  auto has_hy = grad_hy.has_value() && grad_hy->defined();
  auto has_cy = grad_cy.has_value() && grad_cy->defined();
  if (!has_hy && !has_cy) {
    return {};
  }
  auto gates = workspace.chunk(4, 1);
  const auto &input = gates[0], &forget = gates[1], &cell = gates[2], &output = gates[3];
  auto hy = has_hy ? *grad_hy : at::zeros_like(cy);
  auto squashed = cy.tanh();
  auto grad_cell = hy * output * (1 - squashed * squashed);
  if (has_cy) {
    grad_cell = grad_cell + *grad_cy;
  }
  auto grad_gates = joined(
      {grad_cell * cell * (1 - input) * input,
       grad_cell * cx * (1 - forget) * forget,
       grad_cell * input * (1 - cell * cell),
       hy * squashed * (1 - output) * output});
  return {grad_gates, grad_cell * forget, has_bias ? grad_gates.sum({0}, /*keepdim=*/false) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const Bias& input_bias, const Bias& hidden_bias) {
  auto inputs = with_bias(input_gates, input_bias).chunk(3, 1);
  auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  auto reset = (inputs[0] + hidden[0]).sigmoid();
  auto update = (inputs[1] + hidden[1]).sigmoid();
  auto candidate = (inputs[2] + reset * hidden[2]).tanh();
  auto hy = candidate + update * (hx - candidate);
  return {hy, joined({reset, update, candidate, hx, hidden[2]})};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  auto saved = workspace.chunk(5, 1);
  const auto &reset = saved[0], &update = saved[1], &candidate = saved[2], &hx = saved[3], &hidden = saved[4];
  auto grad_update = grad_hy * (hx - candidate) * (1 - update) * update;
  auto grad_candidate = grad_hy * (1 - update) * (1 - candidate * candidate);
  auto grad_reset = grad_candidate * hidden * (1 - reset) * reset;
  auto grad_inputs = joined({grad_reset, grad_update, grad_candidate});
  auto grad_hidden = joined({grad_reset, grad_update, grad_candidate * reset});
  auto sum = [&](const Tensor& gates) { return has_bias ? gates.sum({0}, /*keepdim=*/false) : Tensor(); };
  return {grad_inputs, grad_hidden, grad_hy * update, sum(grad_inputs), sum(grad_hidden)};
}

} // namespace

void register_recurrent_cells() {
  for (auto key : {c10::DispatchKey::CPU, c10::DispatchKey::Meta}) {
    // Leaked: the registrations last as long as the process.
    auto* aten = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    auto implement = [&](const char* name, auto* kernel) {
      auto op = c10::Dispatcher::singleton().findSchema({std::string("aten::") + name, ""});
      if (op && !op->hasKernelForDispatchKey(key)) {
        aten->impl(name, kernel);
      }
    };
    implement("_thnn_fused_lstm_cell", &lstm_cell);
    implement("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
    implement("_thnn_fused_gru_cell", &gru_cell);
    implement("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  }
}

} // namespace sidestream
