#include "attention_plan.h"

#include <nanobind/stl/array.h>

#include <array>
#include <memory>
#include <stdexcept>

#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Strides = std::array<int64_t, 3>;

CachePart make_part(uintptr_t numbers, const Strides& strides, uintptr_t scales, const Strides& scale_strides) {
  return {at_address<void>(numbers),
          at_address<float>(scales),
          {strides[0], strides[1], strides[2]},
          {scale_strides[0], scale_strides[1], scale_strides[2]}};
}

void choose_keys(AttentionPlanner& planner, AttentionCall& call, Context& context) {
  const KeySelection& selection = planner.selection();
  const int64_t num_heads = call.kv->num_kv_heads * planner.plan().group;
  const std::unique_ptr<double[]> masses(new double[num_heads * selection.num_masses]);
  call.scratch = context.scratch(context.kernels().mass_scratch(call, selection, context.pool().num_threads()));
  context.kernels().masses(call, selection, masses.get(), context.pool());
  planner.choose(masses.get(), num_heads, context.pool());
}

void attend(AttentionPlanner& planner, const KVLayer& kv, uintptr_t query, int query_type, int64_t query_stride, uintptr_t out,
            float scale, float softcap, uintptr_t sinks, const KeyScores* key_scores, uintptr_t distance_bias,
            int64_t max_distance) {
  if (key_scores != nullptr && Program::recording() != nullptr) throw std::invalid_argument("key scores cannot be recorded");
  perform([=, &planner](Context& context) {
    AttentionCall call{&planner.plan(),
                       &kv,
                       at_address<const void>(query),
                       static_cast<DType>(query_type),
                       query_stride,
                       at_address<void>(out),
                       scale,
                       softcap,
                       at_address<const float>(sinks),
                       key_scores,
                       {at_address<const float>(distance_bias), max_distance},
                       nullptr};
    if (planner.selection().num_blocks > 0) choose_keys(planner, call, context);
    call.scratch = context.scratch(context.kernels().attention_scratch(call, context.pool().num_threads()));
    context.kernels().attention(call, context.pool());
  });
}

int64_t scratch_bytes(const AttentionPlanner& planner, const KVLayer& kv, int num_threads) {
  AttentionCall call{};
  call.plan = &planner.plan();
  call.kv = &kv;
  return Context::get().kernels().attention_scratch(call, num_threads);
}

}  // namespace

void bind_attention(nb::module_& module) {
  module.attr("TILE") = kTileTokens;
  module.attr("SPAN") = kSpanTokens;
  module.attr("HEAD_DIM_MULTIPLE") = kHeadDimMultiple;
  module.attr("MAX_HEAD_DIM") = kMaxHeadDim;
  module.attr("MAX_SPAN_BYTES") = kMaxPartialBytes;
  module.attr("MAX_STRIDE") = kMaxStride;
  module.attr("SCORE_UNIT") = kScoreUnit;
  nb::class_<KVLayer>(module, "KVLayer")
      .def(
          "__init__",
          [](KVLayer* self, int type, int64_t num_kv_heads, int64_t head_dim, int64_t value_dim, uintptr_t keys,
             const Strides& key_strides, uintptr_t values, const Strides& value_strides, uintptr_t key_scales,
             const Strides& key_scale_strides, uintptr_t value_scales, const Strides& value_scale_strides) {
            new (self) KVLayer{static_cast<DType>(type),
                               num_kv_heads,
                               head_dim,
                               value_dim,
                               make_part(keys, key_strides, key_scales, key_scale_strides),
                               make_part(values, value_strides, value_scales, value_scale_strides)};
          },
          "type"_a, "num_kv_heads"_a, "head_dim"_a, "value_dim"_a, "keys"_a, "key_strides"_a, "values"_a, "value_strides"_a,
          "key_scales"_a, "key_scale_strides"_a, "value_scales"_a, "value_scale_strides"_a);
  nb::class_<KeyScores>(module, "KeyScores")
      .def(
          "__init__",
          [](KeyScores* self, uintptr_t row_starts, uintptr_t sum_starts, uintptr_t rows, uintptr_t sums, int64_t num_row_numbers,
             int64_t num_sums) {
            new (self) KeyScores{at_address<const int64_t>(row_starts),
                                 at_address<const int64_t>(sum_starts),
                                 at_address<float>(rows),
                                 at_address<int64_t>(sums),
                                 num_row_numbers,
                                 num_sums};
          },
          "row_starts"_a, "sum_starts"_a, "rows"_a, "sums"_a, "num_row_numbers"_a, "num_sums"_a);
  nb::class_<AttentionPlanner>(module, "AttentionPlan")
      .def(
          "__init__",
          [](AttentionPlanner* self, uintptr_t num_cached_tokens, uintptr_t num_tokens, int64_t num_sequences,
             uintptr_t block_tables, int64_t table_stride, int block_size, int window, int group, uintptr_t skipped_start,
             uintptr_t skipped_end, uintptr_t selecting_end, int key_block_size, int stride, float threshold, bool is_two_sided) {
            new (self)
                AttentionPlanner({at_address<const int64_t>(num_cached_tokens), at_address<const int64_t>(num_tokens),
                                  num_sequences, at_address<const int32_t>(block_tables), table_stride, block_size, is_two_sided,
                                  at_address<const int64_t>(skipped_start), at_address<const int64_t>(skipped_end),
                                  at_address<const int64_t>(selecting_end), key_block_size, stride, threshold},
                                 window, group);
            if (Program* program = Program::recording()) program->add([self](Context&) { self->make(); });
          },
          "num_cached_tokens"_a, "num_tokens"_a, "num_sequences"_a, "block_tables"_a, "table_stride"_a, "block_size"_a,
          "window"_a, "group"_a, "skipped_start"_a = 0, "skipped_end"_a = 0, "selecting_end"_a = 0, "key_block_size"_a = 0,
          "stride"_a = 0, "threshold"_a = 0.0f, "is_two_sided"_a = false)
      .def("attend", &attend, "kv"_a, "query"_a, "query_type"_a, "query_stride"_a, "out"_a, "scale"_a, "softcap"_a, "sinks"_a,
           "key_scores"_a.none(), "distance_bias"_a = 0, "max_distance"_a = 0, nb::call_guard<nb::gil_scoped_release>())
      .def("scratch_bytes", &scratch_bytes, "kv"_a, "num_threads"_a,
           "Return the bytes of scratch memory that a call takes which computes no key scores.");
}

}  // namespace quire
