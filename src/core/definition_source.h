// The sources of definitions, used to compile GPU kernels on demand.
#ifndef GNOMON_SRC_CORE_DEFINITION_SOURCE_H_
#define GNOMON_SRC_CORE_DEFINITION_SOURCE_H_

#include "gnomon/attention.h"

namespace gnomon {

struct DefinitionSource {
  const char* struct_name;
  const char* file_name;  // without the folder
  const char* text;       // content of the file
};

// Adds the source of an external pair function. The strings are not copied.
void AddDefinitionSource(const PairFunction& function, const DefinitionSource& text);

// Null for pair functions that were not compiled by the library's CMake functions.
const DefinitionSource* FindDefinitionSource(const PairFunction& function);

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_DEFINITION_SOURCE_H_
