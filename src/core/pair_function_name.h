// Names of the functions that compiled definitions export.
#ifndef GNOMON_SRC_CORE_PAIR_FUNCTION_NAME_H_
#define GNOMON_SRC_CORE_PAIR_FUNCTION_NAME_H_

#define GNOMON_PAIR_FUNCTION(Name) GNOMON_PAIR_FUNCTION_(Name)
#define GNOMON_PAIR_FUNCTION_(Name) PairFunctionOf##Name

#define GNOMON_DEFINITION_SOURCE(Name) GNOMON_DEFINITION_SOURCE_(Name)
#define GNOMON_DEFINITION_SOURCE_(Name) DefinitionSourceOf##Name

#endif  // GNOMON_SRC_CORE_PAIR_FUNCTION_NAME_H_
