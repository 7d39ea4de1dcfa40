#include <nanobind/stl/string.h>

#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

void bind_threads(nb::module_& module) {
  module.def("set_threads", [](int num_threads) { Context::get().set_threads(num_threads); }, "num_threads"_a);
  module.def("num_threads", [] { return Context::get().pool().num_threads(); });
  module.def(
      "set_instruction_set", [](const std::string& name) { return Context::get().set_instruction_set(name.c_str()); }, "name"_a);
  module.def("instruction_set", [] { return Context::get().kernels().instruction_set; });
}

}  // namespace quire
