#include "module.h"

NB_MODULE(_native, module) {
  quire::bind_threads(module);
  quire::bind_program(module);
  quire::bind_linear(module);
  quire::bind_attention(module);
  quire::bind_elementwise(module);
  quire::bind_recurrence(module);
  quire::bind_sampling(module);
}
