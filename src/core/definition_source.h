// The sources of definitions, from which kernels for GPUs are compiled when they are needed.
#ifndef GNOMON_SRC_CORE_DEFINITION_SOURCE_H_
#define GNOMON_SRC_CORE_DEFINITION_SOURCE_H_

#include "gnomon/attention.h"

namespace gnomon {

struct DefinitionSource {
  const char* struct_name;
  const char* file_name;  // without its folder
  const char* text;       // of the file
};

// That of a pair function from outside the library; what it points to must stay where it is.
void AddDefinitionSource(const PairFunction& function, const DefinitionSource& text);

// Null if there is none: a pair function that was not compiled by the library's CMake functions.
const DefinitionSource* FindDefinitionSource(const PairFunction& function);

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_DEFINITION_SOURCE_H_
