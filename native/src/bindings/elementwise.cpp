#include <cstring>
#include <stdexcept>

#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

void norm(uintptr_t rows, uintptr_t delta, uintptr_t weight, uintptr_t out, int type, int64_t num_rows, int64_t num_features,
          int64_t row_stride, int64_t delta_stride, int64_t out_stride, float scale, float eps, uintptr_t bias) {
  perform([=](Context& context) {
    context.kernels().norm({at_address<void>(rows), at_address<const void>(delta), at_address<const float>(weight),
                            at_address<void>(out), static_cast<DType>(type), num_rows, num_features, row_stride, delta_stride,
                            out_stride, scale, eps, at_address<const float>(bias)},
                           context.pool());
  });
}

void gated_activation(uintptr_t gate_up, uintptr_t out, int type, int activation, int64_t num_rows, int64_t num_features,
                      int64_t row_stride, int64_t out_stride, bool has_up) {
  perform([=](Context& context) {
    context.kernels().gated_activation(
        {at_address<const void>(gate_up), at_address<void>(out), static_cast<DType>(type), static_cast<Activation>(activation),
         num_rows, num_features, row_stride, out_stride, has_up},
        context.pool());
  });
}

void gate(uintptr_t rows, uintptr_t gate, int type, bool has_silu, int64_t num_tokens, int64_t num_heads, int64_t num_features,
          int64_t token_stride, int64_t head_stride, int64_t feature_stride, uintptr_t norm_weight, float eps) {
  perform([=](Context& context) {
    context.kernels().gate({at_address<void>(rows),
                            at_address<const void>(gate),
                            static_cast<DType>(type),
                            has_silu,
                            num_tokens,
                            num_heads,
                            num_features,
                            {token_stride, head_stride, feature_stride},
                            at_address<const float>(norm_weight),
                            eps},
                           context.pool());
  });
}

void soft_cap(uintptr_t numbers, int64_t count, float cap) {
  perform([=](Context& context) { context.kernels().soft_cap({at_address<float>(numbers), count, cap}, context.pool()); });
}

void rotary_and_write_kv(const KVLayer& kv, uintptr_t qkv, int type, int64_t num_rows, int64_t row_stride, int64_t num_heads,
                         uintptr_t cos, uintptr_t sin, int64_t half, uintptr_t q_norm, uintptr_t k_norm, int64_t q_norm_size,
                         int64_t k_norm_size, float eps, uintptr_t blocks, uintptr_t offsets) {
  perform([=](Context& context) {
    context.kernels().rotary_and_write_kv({at_address<void>(qkv),
                                           static_cast<DType>(type),
                                           num_rows,
                                           row_stride,
                                           num_heads,
                                           kv.num_kv_heads,
                                           kv.head_dim,
                                           kv.value_dim,
                                           at_address<const float>(cos),
                                           at_address<const float>(sin),
                                           half,
                                           at_address<const float>(q_norm),
                                           at_address<const float>(k_norm),
                                           q_norm_size,
                                           k_norm_size,
                                           eps,
                                           kv.type,
                                           kv.keys,
                                           kv.values,
                                           at_address<const int64_t>(blocks),
                                           at_address<const int64_t>(offsets)},
                                          context.pool());
  });
}

void rotary(uintptr_t states, int type, int64_t num_rows, int64_t row_stride, int64_t num_heads, int64_t head_dim, uintptr_t cos,
            uintptr_t sin, int64_t half, uintptr_t norm, int64_t norm_size, float eps) {
  perform([=](Context& context) {
    RotaryCall call{};
    call.qkv = at_address<void>(states);
    call.type = static_cast<DType>(type);
    call.num_rows = num_rows;
    call.row_stride = row_stride;
    call.num_heads = num_heads;
    call.head_dim = head_dim;
    call.cos = at_address<const float>(cos);
    call.sin = at_address<const float>(sin);
    call.half = half;
    call.q_norm = at_address<const float>(norm);
    call.q_norm_size = norm_size;
    call.eps = eps;
    context.kernels().rotary_and_write_kv(call, context.pool());
  });
}

void sum_rows(uintptr_t rows, int type, int64_t num_rows, int64_t row_stride, int64_t num_features, uintptr_t pieces,
              int64_t num_pieces, uintptr_t shares, uintptr_t sums, int64_t num_sums, double unit) {
  const auto* all = at_address<const SumRowsCall::Piece>(pieces);
  for (int64_t i = 0; i < num_pieces; ++i) {
    const bool has_rows = all[i].first_row >= 0 && all[i].num_rows >= 0 && all[i].first_row <= num_rows - all[i].num_rows;
    if (!has_rows || all[i].place < 0 || all[i].place >= num_sums) throw std::out_of_range("a piece has no rows, or no sum");
  }
  compute([=](Context& context) {
    context.kernels().sum_rows({at_address<const void>(rows), static_cast<DType>(type), row_stride, num_features, all, num_pieces,
                                at_address<const double>(shares), at_address<double>(sums), unit},
                               context.pool());
  });
}

void gather_rows(uintptr_t rows, int64_t num_rows, int64_t row_bytes, uintptr_t places, int64_t num_places, uintptr_t out) {
  perform([=](Context&) {
    for (int64_t i = 0; i < num_places; ++i) {
      const int64_t place = at_address<const int64_t>(places)[i];
      if (place < 0 || place >= num_rows) throw std::out_of_range("there is no such row");
      std::memcpy(at_address<char>(out) + i * row_bytes, at_address<const char>(rows) + place * row_bytes, row_bytes);
    }
  });
}

}  // namespace

void bind_elementwise(nb::module_& module) {
  nb::enum_<Activation>(module, "Activation")
      .value("silu", Activation::kSilu)
      .value("gelu_tanh", Activation::kGeluTanh)
      .value("gelu", Activation::kGelu)
      .value("relu2", Activation::kRelu2)
      .value("clamped_swiglu", Activation::kClampedSwiglu);
  module.def("norm", &norm, "rows"_a, "delta"_a, "weight"_a, "out"_a, "type"_a, "num_rows"_a, "num_features"_a, "row_stride"_a,
             "delta_stride"_a, "out_stride"_a, "scale"_a, "eps"_a, "bias"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def("gated_activation", &gated_activation, "gate_up"_a, "out"_a, "type"_a, "activation"_a, "num_rows"_a,
             "num_features"_a, "row_stride"_a, "out_stride"_a, "has_up"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def("gate", &gate, "rows"_a, "gate"_a, "type"_a, "has_silu"_a, "num_tokens"_a, "num_heads"_a, "num_features"_a,
             "token_stride"_a, "head_stride"_a, "feature_stride"_a, "norm_weight"_a, "eps"_a,
             nb::call_guard<nb::gil_scoped_release>());
  module.def("soft_cap", &soft_cap, "numbers"_a, "count"_a, "cap"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def("sum_rows", &sum_rows, "rows"_a, "type"_a, "num_rows"_a, "row_stride"_a, "num_features"_a, "pieces"_a,
             "num_pieces"_a, "shares"_a, "sums"_a, "num_sums"_a, "unit"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def("gather_rows", &gather_rows, "rows"_a, "num_rows"_a, "row_bytes"_a, "places"_a, "num_places"_a, "out"_a,
             nb::call_guard<nb::gil_scoped_release>());
  module.def("rotary_and_write_kv", &rotary_and_write_kv, "kv"_a, "qkv"_a, "type"_a, "num_rows"_a, "row_stride"_a, "num_heads"_a,
             "cos"_a, "sin"_a, "half"_a, "q_norm"_a, "k_norm"_a, "q_norm_size"_a, "k_norm_size"_a, "eps"_a, "blocks"_a,
             "offsets"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def("rotary", &rotary, "states"_a, "type"_a, "num_rows"_a, "row_stride"_a, "num_heads"_a, "head_dim"_a, "cos"_a, "sin"_a,
             "half"_a, "norm"_a, "norm_size"_a, "eps"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire
