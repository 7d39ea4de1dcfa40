#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "experts.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

// Address, type, number of rows, the addresses of scales and zeros or 0, and the kind of blocks: see WeightSource.
using Source = std::tuple<uintptr_t, int, int64_t, uintptr_t, uintptr_t, int>;

PackedWeight make_weight(int format, int64_t out_features, int64_t in_features, int64_t group_size, uintptr_t panels,
                         bool has_int8_rows) {
  return {static_cast<WeightFormat>(format), out_features, in_features, group_size,
          at_address<const char>(panels),    has_int8_rows};
}

bool pack(const PackedWeight& weight, const std::vector<Source>& sources, int64_t gated_features, uintptr_t norms) {
  std::vector<WeightSource> parts;
  for (const auto& [rows, type, num_rows, scales, zeros, block] : sources) {
    parts.push_back({at_address<const void>(rows), static_cast<DType>(type), num_rows, at_address<const float>(scales),
                     at_address<const float>(zeros), static_cast<GgmlBlock>(block)});
  }
  Context& context = Context::get();
  const std::lock_guard<std::mutex> lock(context.mutex);
  PackCall call{&weight,        const_cast<char*>(weight.panels), parts.data(), static_cast<int64_t>(parts.size()), nullptr,
                gated_features, at_address<float>(norms)};
  call.scratch = context.scratch(context.kernels().pack_scratch(call, context.pool().num_threads()));
  return context.kernels().pack(call, context.pool());
}

void linear(const PackedWeight& weight, uintptr_t rows, int row_type, int64_t row_stride, int64_t num_rows, uintptr_t bias,
            uintptr_t out, int out_type, int64_t out_stride) {
  perform([=](Context& context) {
    const int64_t bytes = LinearScratch(weight, num_rows).total;
    context.kernels().linear(
        {&weight, at_address<const void>(rows), static_cast<DType>(row_type), row_stride, num_rows, at_address<const float>(bias),
         at_address<void>(out), static_cast<DType>(out_type), out_stride, context.scratch(bytes)},
        context.pool());
  });
}

// A matrix and what screens its products; norms are the caller's, see ShortlistCall.
struct ShortlistedWeight {
  PackedWeight exact, screen;
  const float* norms;
  mutable int64_t num_skipped = 0;  // calls since a shortlist was too long

  ShortlistedWeight(const PackedWeight& exact, const PackedWeight& screen, uintptr_t norms)
      : exact(exact), screen(screen), norms(at_address<const float>(norms)) {}

  void largest(uintptr_t rows, int row_type, int64_t row_stride, int64_t num_rows, uintptr_t num_largest, uintptr_t out,
               int64_t out_stride) const {
    perform([=, this](Context& context) {
      LinearCall call = {&exact,
                         at_address<const void>(rows),
                         static_cast<DType>(row_type),
                         row_stride,
                         num_rows,
                         nullptr,
                         at_address<void>(out),
                         DType::kFloat32,
                         out_stride,
                         nullptr};
      const int64_t wanted = *at_address<const int64_t>(num_largest);
      if (wanted > 0 && num_rows > 0 && num_rows <= kMaxShortlistRows && (num_skipped == 0 || num_skipped == kShortlistPause)) {
        char* scratch = context.scratch(ShortlistScratch(exact, screen, num_rows).total);
        const bool is_short = context.kernels().shortlist({call, &screen, norms, wanted, scratch}, context.pool());
        num_skipped = is_short ? 0 : 1;
        return;
      }
      num_skipped += num_skipped > 0;
      call.scratch = context.scratch(LinearScratch(exact, num_rows).total);
      context.kernels().linear(call, context.pool());
    });
  }
};

// The packed experts of a layer; panels and biases are the caller's, see ExpertsCall.
struct PackedExperts {
  PackedWeight gate_up, down;
  std::vector<const char*> gate_up_panels, down_panels;
  const float *gate_up_bias, *down_bias;
  Activation activation;
  Routing routing;

  PackedExperts(const std::vector<PackedWeight>& gate_ups, const std::vector<PackedWeight>& downs, uintptr_t gate_up_bias,
                uintptr_t down_bias, int activation, const Routing& routing)
      : gate_up(gate_ups.at(0)),
        down(downs.at(0)),
        gate_up_bias(at_address<const float>(gate_up_bias)),
        down_bias(at_address<const float>(down_bias)),
        activation(static_cast<Activation>(activation)),
        routing(routing) {
    for (const PackedWeight& weight : gate_ups) gate_up_panels.push_back(weight.panels);
    for (const PackedWeight& weight : downs) down_panels.push_back(weight.panels);
  }

  void compute(uintptr_t rows, int row_type, int64_t row_stride, int64_t num_rows, uintptr_t scores, int score_type,
               int64_t score_stride, uintptr_t out, int out_type, int64_t out_stride) const {
    perform([=](Context& context) {
      ExpertsCall call = {&gate_up,
                          &down,
                          gate_up_panels.data(),
                          down_panels.data(),
                          gate_up_bias,
                          down_bias,
                          static_cast<int64_t>(gate_up_panels.size()),
                          activation,
                          at_address<const void>(rows),
                          static_cast<DType>(row_type),
                          row_stride,
                          num_rows,
                          nullptr,
                          nullptr,
                          routing.num_chosen,
                          at_address<void>(out),
                          static_cast<DType>(out_type),
                          out_stride,
                          nullptr};
      const int64_t pairs = num_rows * routing.num_chosen, own = round_up(experts_scratch(call), kLine);
      call.scratch = context.scratch(own + pairs * (sizeof(int64_t) + sizeof(float)));
      auto* chosen = reinterpret_cast<int64_t*>(call.scratch + own);
      auto* weights = reinterpret_cast<float*>(chosen + pairs);
      context.kernels().route(
          {&routing, at_address<const void>(scores), static_cast<DType>(score_type), score_stride, num_rows, chosen, weights},
          context.pool());
      call.chosen = chosen;
      call.weights = weights;
      experts(call, context.kernels(), context.pool());
    });
  }
};

Routing make_routing(int scoring, int64_t num_experts, int64_t num_chosen, bool normalize, float jitter, uintptr_t correction,
                     int64_t num_groups, int64_t num_chosen_groups, float scale, uintptr_t expert_scales) {
  return {static_cast<Scoring>(scoring),       num_experts, num_chosen,        normalize, jitter,
          at_address<const float>(correction), num_groups,  num_chosen_groups, scale,     at_address<const float>(expert_scales)};
}

}  // namespace

void bind_linear(nb::module_& module) {
  nb::enum_<DType>(module, "DType")
      .value("float32", DType::kFloat32)
      .value("bfloat16", DType::kBFloat16)
      .value("float16", DType::kFloat16)
      .value("int8", DType::kInt8)
      .value("int4", DType::kInt4)
      .value("uint8", DType::kUInt8);
  nb::enum_<GgmlBlock>(module, "GgmlBlock")
      .value("Q4_0", GgmlBlock::kQ4_0)
      .value("Q4_1", GgmlBlock::kQ4_1)
      .value("Q5_0", GgmlBlock::kQ5_0)
      .value("Q5_1", GgmlBlock::kQ5_1)
      .value("Q8_0", GgmlBlock::kQ8_0)
      .value("Q2_K", GgmlBlock::kQ2_K)
      .value("Q3_K", GgmlBlock::kQ3_K)
      .value("Q4_K", GgmlBlock::kQ4_K)
      .value("Q5_K", GgmlBlock::kQ5_K)
      .value("Q6_K", GgmlBlock::kQ6_K)
      .value("IQ4_NL", GgmlBlock::kIQ4_NL)
      .value("IQ4_XS", GgmlBlock::kIQ4_XS)
      .value("MXFP4", GgmlBlock::kMXFP4);
  nb::enum_<WeightFormat>(module, "WeightFormat")
      .value("float32", WeightFormat::kFloat32)
      .value("bfloat16", WeightFormat::kBFloat16)
      .value("float16", WeightFormat::kFloat16)
      .value("int8", WeightFormat::kInt8)
      .value("int4", WeightFormat::kInt4)
      .value("grouped_int8", WeightFormat::kGroupedInt8)
      .value("mxfp4", WeightFormat::kMxfp4)
      .value("int6", WeightFormat::kInt6);
  nb::class_<PackedWeight>(module, "PackedWeight")
      .def(
          "__init__",
          [](PackedWeight* self, int format, int64_t out_features, int64_t in_features, int64_t group_size, uintptr_t panels,
             bool has_int8_rows) {
            new (self) PackedWeight(make_weight(format, out_features, in_features, group_size, panels, has_int8_rows));
          },
          "format"_a, "out_features"_a, "in_features"_a, "group_size"_a, "panels"_a, "has_int8_rows"_a = false)
      .def("pack", &pack, "sources"_a, "gated_features"_a = 0, "norms"_a = 0, nb::call_guard<nb::gil_scoped_release>())
      .def("linear", &linear, "rows"_a, "row_type"_a, "row_stride"_a, "num_rows"_a, "bias"_a, "out"_a, "out_type"_a,
           "out_stride"_a, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<ShortlistedWeight>(module, "ShortlistedWeight")
      .def(nb::init<const PackedWeight&, const PackedWeight&, uintptr_t>(), "exact"_a, "screen"_a, "norms"_a)
      .def("largest", &ShortlistedWeight::largest, "rows"_a, "row_type"_a, "row_stride"_a, "num_rows"_a, "num_largest"_a, "out"_a,
           "out_stride"_a, nb::call_guard<nb::gil_scoped_release>());
  module.attr("MAX_EXPERTS") = kMaxExperts;
  nb::enum_<Scoring>(module, "Scoring")
      .value("softmax", Scoring::kSoftmax)
      .value("sigmoid", Scoring::kSigmoid)
      .value("sparsemixer", Scoring::kSparsemixer);
  nb::class_<Routing>(module, "Routing")
      .def(nb::new_(&make_routing), "scoring"_a, "num_experts"_a, "num_chosen"_a, "normalize"_a, "jitter"_a, "correction"_a,
           "num_groups"_a, "num_chosen_groups"_a, "scale"_a, "expert_scales"_a);
  nb::class_<PackedExperts>(module, "PackedExperts")
      .def(nb::init<const std::vector<PackedWeight>&, const std::vector<PackedWeight>&, uintptr_t, uintptr_t, int,
                    const Routing&>(),
           "gate_ups"_a, "downs"_a, "gate_up_bias"_a, "down_bias"_a, "activation"_a, "routing"_a)
      .def("compute", &PackedExperts::compute, "rows"_a, "row_type"_a, "row_stride"_a, "num_rows"_a, "scores"_a, "score_type"_a,
           "score_stride"_a, "out"_a, "out_type"_a, "out_stride"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "packed_bytes",
      [](int format, int64_t out_features, int64_t in_features, int64_t group_size) {
        return make_weight(format, out_features, in_features, group_size, 0, false).bytes();
      },
      "format"_a, "out_features"_a, "in_features"_a, "group_size"_a);
}

}  // namespace quire
