#include "attention_plan.h"

#include <nanobind/stl/array.h>

#include <array>

#include "module.h"

namespace nb = nanobind;

namespace quire {
namespace {

using Strides = std::array<int64_t, 3>;

CachePart make_part(uintptr_t numbers, const Strides& strides, uintptr_t scales, const Strides& scale_strides) {
  return {at_address<void>(numbers),
          at_address<float>(scales),
          {strides[0], strides[1], strides[2]},
          {scale_strides[0], scale_strides[1], scale_strides[2]}};
}

void attend(const AttentionPlanner& planner, const KVLayer& kv, uintptr_t query, int query_type, int64_t query_stride,
            uintptr_t out, float scale, float softcap, uintptr_t sinks, uintptr_t key_scores) {
  Context& context = Context::get();
  const std::lock_guard<std::mutex> lock(context.mutex);
  AttentionCall call{&planner.plan(),
                     &kv,
                     at_address<const void>(query),
                     static_cast<DType>(query_type),
                     query_stride,
                     at_address<void>(out),
                     scale,
                     softcap,
                     at_address<const float>(sinks),
                     at_address<float>(key_scores),
                     nullptr};
  call.scratch = context.scratch(context.kernels().attention_scratch(call, context.pool().num_threads()));
  context.kernels().attention(call, context.pool());
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<KVLayer>(module, "KVLayer")
      .def("__init__", [](KVLayer* self, int type, int64_t num_kv_heads, int64_t head_dim, uintptr_t keys,
                          const Strides& key_strides, uintptr_t values, const Strides& value_strides, uintptr_t key_scales,
                          const Strides& key_scale_strides, uintptr_t value_scales, const Strides& value_scale_strides) {
        new (self)
            KVLayer{static_cast<DType>(type), num_kv_heads, head_dim, make_part(keys, key_strides, key_scales, key_scale_strides),
                    make_part(values, value_strides, value_scales, value_scale_strides)};
      });
  nb::class_<AttentionPlanner>(module, "AttentionPlan")
      .def("__init__",
           [](AttentionPlanner* self, uintptr_t num_computed_tokens, uintptr_t num_tokens, int64_t num_sequences,
              uintptr_t block_tables, int64_t table_stride, int block_size, int window, int group) {
             new (self) AttentionPlanner({at_address<const int64_t>(num_computed_tokens), at_address<const int64_t>(num_tokens),
                                          num_sequences, at_address<const int32_t>(block_tables), table_stride, block_size},
                                         window, group);
           })
      .def("attend", &attend, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire
