#include "recurrence.h"

#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

// Layers with a state: a step's sequences.
SequenceRows rows_of(int64_t num_seqs, uintptr_t states, uintptr_t ends, uintptr_t state_ends, uintptr_t num_before) {
  return {num_seqs, at_address<const int64_t>(states), at_address<const int64_t>(ends), at_address<const int64_t>(state_ends),
          at_address<const int64_t>(num_before)};
}

void conv(uintptr_t rows, uintptr_t out, int type, int64_t row_stride, int64_t num_features, int64_t num_taps, uintptr_t weight,
          uintptr_t bias, bool has_silu, uintptr_t state, int64_t state_stride, const SequenceRows& sequences) {
  perform([=](Context& context) {
    context.kernels().conv({at_address<const void>(rows), at_address<void>(out), static_cast<DType>(type), row_stride,
                            num_features, num_taps, at_address<const float>(weight), at_address<const float>(bias), has_silu,
                            at_address<void>(state), state_stride, sequences},
                           context.pool());
  });
}

void delta_rule(uintptr_t qkv, uintptr_t strengths, int64_t strength_stride, uintptr_t times, int64_t time_stride, uintptr_t out,
                int type, int64_t num_key_heads, int64_t num_value_heads, int64_t key_dim, int64_t value_dim,
                int64_t times_per_head, uintptr_t decay, uintptr_t time_bias, float max_strength, uintptr_t state,
                int64_t state_stride, const SequenceRows& sequences) {
  perform([=](Context& context) {
    context.kernels().delta_rule(
        {at_address<const void>(qkv), at_address<const void>(strengths), strength_stride, at_address<const void>(times),
         time_stride, at_address<void>(out), static_cast<DType>(type), num_key_heads, num_value_heads, key_dim, value_dim,
         times_per_head, at_address<const float>(decay), at_address<const float>(time_bias), max_strength,
         at_address<float>(state), state_stride, sequences},
        context.pool());
  });
}

void scan(uintptr_t inputs, uintptr_t times, int64_t time_stride, uintptr_t out, int64_t out_stride, int type, int64_t num_heads,
          int64_t head_dim, int64_t num_groups, int64_t state_size, uintptr_t decay, uintptr_t time_bias, uintptr_t skip,
          float least_time, float most_time, uintptr_t state, int64_t state_stride, const SequenceRows& sequences) {
  perform([=](Context& context) {
    context.kernels().scan({at_address<const void>(inputs), at_address<const void>(times), time_stride, at_address<void>(out),
                            out_stride, static_cast<DType>(type), num_heads, head_dim, num_groups, state_size,
                            at_address<const float>(decay), at_address<const float>(time_bias), at_address<const float>(skip),
                            least_time, most_time, at_address<float>(state), state_stride, sequences},
                           context.pool());
  });
}

}  // namespace

void bind_recurrence(nb::module_& module) {
  module.attr("MAX_TAPS") = kMaxTaps;
  module.attr("MAX_KEY_DIM") = kMaxKeyDim;
  nb::class_<SequenceRows>(module, "SequenceRows")
      .def(nb::new_(&rows_of), "num_seqs"_a, "states"_a, "ends"_a, "state_ends"_a, "num_before"_a);
  module.def("conv", &conv, "rows"_a, "out"_a, "type"_a, "row_stride"_a, "num_features"_a, "num_taps"_a, "weight"_a, "bias"_a,
             "has_silu"_a, "state"_a, "state_stride"_a, "sequences"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def("delta_rule", &delta_rule, "qkv"_a, "strengths"_a, "strength_stride"_a, "times"_a, "time_stride"_a, "out"_a,
             "type"_a, "num_key_heads"_a, "num_value_heads"_a, "key_dim"_a, "value_dim"_a, "times_per_head"_a, "decay"_a,
             "time_bias"_a, "max_strength"_a, "state"_a, "state_stride"_a, "sequences"_a,
             nb::call_guard<nb::gil_scoped_release>());
  module.def("scan", &scan, "inputs"_a, "times"_a, "time_stride"_a, "out"_a, "out_stride"_a, "type"_a, "num_heads"_a,
             "head_dim"_a, "num_groups"_a, "state_size"_a, "decay"_a, "time_bias"_a, "skip"_a, "least_time"_a, "most_time"_a,
             "state"_a, "state_stride"_a, "sequences"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire
