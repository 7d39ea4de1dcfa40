// The table of one instruction set. Compiled once for each; see kernels.cmake for those that have only some kernels of their own.
#include "dispatch.h"

#define QUIRE_TEXT_OF(name) #name
#define QUIRE_TEXT(name) QUIRE_TEXT_OF(name)

namespace quire::QUIRE_BASE_ISA {

int64_t pack_scratch(const PackCall& call, int num_threads);
bool pack(const PackCall& call, ThreadPool& pool);
int64_t mass_scratch(const AttentionCall& call, const KeySelection& selection, int num_threads);
void masses(const AttentionCall& call, const KeySelection& selection, double* to, ThreadPool& pool);
void norm(const NormCall& call, ThreadPool& pool);
void gated_activation(const GatedActivationCall& call, ThreadPool& pool);
void gate(const GateCall& call, ThreadPool& pool);
void soft_cap(const SoftCapCall& call, ThreadPool& pool);
void combine(const CombineCall& call, ThreadPool& pool);
void sum_rows(const SumRowsCall& call, ThreadPool& pool);
void rotary_and_write_kv(const RotaryCall& call, ThreadPool& pool);
void conv(const ConvCall& call, ThreadPool& pool);
void delta_rule(const DeltaRuleCall& call, ThreadPool& pool);
void scan(const ScanCall& call, ThreadPool& pool);
void route(const RoutingCall& call, ThreadPool& pool);
void largest(const LargestCall& call, ThreadPool& pool);
void likeliest(const LikeliestCall& call, ThreadPool& pool);
void sum_exp(const SumExpCall& call, ThreadPool& pool);
void ranks(const RanksCall& call, ThreadPool& pool);

}  // namespace quire::QUIRE_BASE_ISA

namespace quire::QUIRE_ISA {

using namespace QUIRE_BASE_ISA;

void linear(const LinearCall& call, ThreadPool& pool);
bool shortlist(const ShortlistCall& call, ThreadPool& pool);
int64_t attention_scratch(const AttentionCall& call, int num_threads);
void attention(const AttentionCall& call, ThreadPool& pool);

extern const Kernels kKernels;
const Kernels kKernels = {
    QUIRE_TEXT(QUIRE_ISA),
    pack_scratch,
    pack,
    linear,
    shortlist,
    attention_scratch,
    attention,
    mass_scratch,
    masses,
    norm,
    gated_activation,
    gate,
    soft_cap,
    combine,
    sum_rows,
    rotary_and_write_kv,
    conv,
    delta_rule,
    scan,
    route,
    largest,
    likeliest,
    sum_exp,
    ranks,
};

}  // namespace quire::QUIRE_ISA
