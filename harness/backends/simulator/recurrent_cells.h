// The fused cells of LSTM and GRU, which PyTorch has for CUDA alone: CPU kernels for them, so that they can be launched.
#pragma once

namespace sidestream {

void register_recurrent_cells();

} // namespace sidestream
