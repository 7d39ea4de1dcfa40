// Each file of this folder binds one room. Tensors come as addresses: what they point to is checked in quire.kernels.cpu.
#pragma once

#include <nanobind/nanobind.h>

#include "program.h"

namespace quire {

void bind_threads(nanobind::module_& module);
void bind_program(nanobind::module_& module);
void bind_linear(nanobind::module_& module);
void bind_attention(nanobind::module_& module);
void bind_elementwise(nanobind::module_& module);
void bind_recurrence(nanobind::module_& module);
void bind_sampling(nanobind::module_& module);

template <class T>
T* at_address(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace quire
