# Generates tables from definitions, in one translation unit per definition.

# Sets `result` to the structs of a definition file, except templates. Editing the file reruns CMake.
function(gnomon_definition_structs file result)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(READ ${file} text)
  string(REGEX REPLACE "template <[^\n]*\nstruct " "" text "\n${text}")
  string(REGEX MATCHALL "\nstruct [A-Za-z0-9]+" structs "${text}")
  if(NOT structs)
    message(FATAL_ERROR "${file}: a definition file must contain a struct")
  endif()
  list(TRANSFORM structs REPLACE "\nstruct " "")
  set(${result} ${structs} PARENT_SCOPE)
endfunction()

# Registers definitions that are not part of the library, so that FindPairFunction finds them in
# programs that link `target`.
function(gnomon_register_definitions target)
  foreach(file IN LISTS ARGN)
    gnomon_definition_structs(${file} structs)
    foreach(GNOMON_DEFINITION_STRUCT IN LISTS structs)
      set(source ${PROJECT_BINARY_DIR}/generated/${target}/added_${GNOMON_DEFINITION_STRUCT}.cc)
      configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/added_definition.cc.in ${source} @ONLY)
      target_sources(${target} PRIVATE ${source})
    endforeach()
  endforeach()
endfunction()

# Sets `result` to the name of a struct's pair function: penumbral_square for PenumbralSquare.
function(gnomon_definition_name struct result)
  string(REGEX REPLACE "([a-z0-9])([A-Z])" "\\1_\\2" name ${struct})
  string(TOLOWER ${name} name)
  set(${result} ${name} PARENT_SCOPE)
endfunction()

# Adds the given definition files' similarities to the catalogue of `target`, a library or program.
# PAIR_FUNCTIONS also registers the pair functions of all definitions, for files that are not part
# of the library.
function(gnomon_register_similarities target)
  cmake_parse_arguments(PARSE_ARGV 1 argument "PAIR_FUNCTIONS" "" "")
  set(GNOMON_INCLUDES "")
  set(GNOMON_DECLARATIONS "")
  set(GNOMON_REGISTRATIONS "")
  foreach(file IN LISTS argument_UNPARSED_ARGUMENTS)
    string(APPEND GNOMON_INCLUDES "#include \"${file}\"\n")
    gnomon_definition_structs(${file} structs)
    foreach(struct IN LISTS structs)
      gnomon_definition_name(${struct} name)
      if(argument_PAIR_FUNCTIONS)
        string(
          APPEND GNOMON_DECLARATIONS
          "const PairFunction& PairFunctionOf${struct}();\n"
          "const DefinitionSource& DefinitionSourceOf${struct}();\n"
        )
        string(
          APPEND GNOMON_REGISTRATIONS
          "  const RegisterPairFunction function_of_${name}(PairFunctionOf${struct}());\n"
          "  AddDefinitionSource(PairFunctionOf${struct}(), DefinitionSourceOf${struct}());\n"
        )
      endif()
      string(
        APPEND GNOMON_REGISTRATIONS
        "  RegisterDefinition<reference::${struct}>(\"${name}\", \"${struct}\");\n"
      )
    endforeach()
  endforeach()
  set(source ${PROJECT_BINARY_DIR}/generated/${target}/definition_terms.cc)
  configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/definition_terms.cc.in ${source} @ONLY)
  target_sources(${target} PRIVATE ${source})
endfunction()

# Sets `literal` to a C++ expression for the file's text. Editing the file reruns CMake.
function(gnomon_text_literal file literal)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(READ ${file} text)
  set(${literal} "R\"GNOMON(${text})GNOMON\"" PARENT_SCOPE)
endfunction()

# Compiles the table of each definition in the given files into `target`, together with the
# definition's text for kernels that are compiled on demand. Sets `entries` to the list of definitions,
# for example " X(PenumbralSquare, penumbral_square)". For structs in GNOMON_INLINED_DEFINITIONS,
# the attention passes are also compiled with the definition inlined. DOUBLES adds float64 tables,
# for definitions that are not part of the library.
function(gnomon_add_definitions target entries)
  cmake_parse_arguments(PARSE_ARGV 2 argument "DOUBLES" "" "")
  set(list "")
  foreach(GNOMON_DEFINITION_FILE IN LISTS argument_UNPARSED_ARGUMENTS)
    gnomon_definition_structs(${GNOMON_DEFINITION_FILE} structs)
    foreach(GNOMON_DEFINITION_STRUCT IN LISTS structs)
      gnomon_definition_name(${GNOMON_DEFINITION_STRUCT} GNOMON_DEFINITION_NAME)
      set(GNOMON_INLINED FALSE)
      if(GNOMON_DEFINITION_STRUCT IN_LIST GNOMON_INLINED_DEFINITIONS)
        set(GNOMON_INLINED TRUE)
      endif()
      set(source ${PROJECT_BINARY_DIR}/generated/${target}/kernel_${GNOMON_DEFINITION_STRUCT}.cc)
      configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/definition_kernel.cc.in ${source} @ONLY)
      target_sources(${target} PRIVATE ${source})
      if(argument_DOUBLES)
        set(source ${PROJECT_BINARY_DIR}/generated/${target}/double_${GNOMON_DEFINITION_STRUCT}.cc)
        configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/definition_double.cc.in ${source} @ONLY)
        target_sources(${target} PRIVATE ${source})
      endif()
      get_filename_component(GNOMON_DEFINITION_FILE_NAME ${GNOMON_DEFINITION_FILE} NAME)
      gnomon_text_literal(${GNOMON_DEFINITION_FILE} GNOMON_DEFINITION_LITERAL)
      set(source ${PROJECT_BINARY_DIR}/generated/${target}/source_${GNOMON_DEFINITION_STRUCT}.cc)
      configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/definition_source.cc.in ${source} @ONLY)
      target_sources(${target} PRIVATE ${source})
      string(APPEND list " X(${GNOMON_DEFINITION_STRUCT}, ${GNOMON_DEFINITION_NAME})")
    endforeach()
  endforeach()
  set(${entries} "${list}" PARENT_SCOPE)
endfunction()
