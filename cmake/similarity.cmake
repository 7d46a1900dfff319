# Builds similarities outside the library's source tree.

# gnomon_add_similarity(target file): compiles each definition in `file` for the library's engine
# and links it into `target`, which links gnomon::core or gnomon::torch. The struct Matern becomes
# the pair function "matern", and
#
#   namespace gnomon { const PairFunction& PairFunctionOfMatern(); }
#
# returns it for AttentionForward and AttentionBackward, like FindPairFunction("matern").
# gnomon/kernel/definitions/README.md (installed with the headers) explains definitions; struct
# names must differ from the library's. Instruction sets are chosen at run time: do not use -march.
# For a similarity of gnomon::torch, with a name for attention(), use gnomon_add_terms().
function(gnomon_add_similarity target file)
  get_filename_component(name ${file} NAME_WE)
  get_filename_component(path ${file} ABSOLUTE)
  set(objects ${target}_${name})
  add_library(${objects} OBJECT)
  set_target_properties(${objects} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(${objects} PRIVATE gnomon::kernel)
  gnomon_add_definitions(${objects} entries DOUBLES ${path})
  gnomon_register_definitions(${objects} ${path})
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
endfunction()
