// The kernels of the best instruction set that this CPU has.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "packing.h"
#include "recurrence.h"
#include "routing.h"
#include "sampling.h"
#include "shortlist.h"

namespace quire {

// One entry for each kernel; every instruction set fills a table (kernels/table.cpp).
struct Kernels {
  const char* instruction_set;
  int64_t (*pack_scratch)(const PackCall&, int num_threads);
  bool (*pack)(const PackCall&, ThreadPool&);
  void (*linear)(const LinearCall&, ThreadPool&);
  bool (*shortlist)(const ShortlistCall&, ThreadPool&);                 // whether few panels were multiplied
  int64_t (*attention_scratch)(const AttentionCall&, int num_threads);  // bytes that a call needs
  void (*attention)(const AttentionCall&, ThreadPool&);
  int64_t (*mass_scratch)(const AttentionCall&, const KeySelection&, int num_threads);
  void (*masses)(const AttentionCall&, const KeySelection&, double* masses, ThreadPool&);
  void (*norm)(const NormCall&, ThreadPool&);
  void (*gated_activation)(const GatedActivationCall&, ThreadPool&);
  void (*gate)(const GateCall&, ThreadPool&);
  void (*soft_cap)(const SoftCapCall&, ThreadPool&);
  void (*combine)(const CombineCall&, ThreadPool&);
  void (*sum_rows)(const SumRowsCall&, ThreadPool&);
  void (*rotary_and_write_kv)(const RotaryCall&, ThreadPool&);
  void (*conv)(const ConvCall&, ThreadPool&);
  void (*delta_rule)(const DeltaRuleCall&, ThreadPool&);
  void (*scan)(const ScanCall&, ThreadPool&);
  void (*route)(const RoutingCall&, ThreadPool&);
  void (*largest)(const LargestCall&, ThreadPool&);
  void (*likeliest)(const LikeliestCall&, ThreadPool&);
  void (*sum_exp)(const SumExpCall&, ThreadPool&);
  void (*ranks)(const RanksCall&, ThreadPool&);
};

// Returns the table of an instruction set: "portable", on x86-64 also "avx2", "avx512", "avx512bf16" and "amx", on 64-bit ARM
// "dotprod" and "i8mmbf16"; null if this build or this CPU lacks it.
const Kernels* find_kernels(const char* instruction_set);

// Returns the table of the best instruction set of this CPU.
const Kernels& best_kernels();

}  // namespace quire
