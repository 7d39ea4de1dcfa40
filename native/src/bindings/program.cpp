#include "program.h"

#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

void bind_program(nb::module_& module) {
  nb::class_<Program>(module, "Program")
      .def(nb::init<>())
      .def(
          "record", [](Program& program) { Program::recording() = &program; },
          "Record the calls of this thread from now on, instead of computing them.")
      .def_prop_ro("is_empty", &Program::is_empty)
      .def("run", &Program::run, nb::call_guard<nb::gil_scoped_release>());
  module.def("stop_recording", [] { Program::recording() = nullptr; });
  module.def("is_recording", [] { return Program::recording() != nullptr; });
}

}  // namespace quire
