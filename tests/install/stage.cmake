# cmake -DBUILD=... -DPREFIX=... -DCOMPONENTS=... -P stage.cmake
#
# Installs the components of a build into a folder and moves it to PREFIX. Moving must not matter.
# No installed file may refer to libraries in the build.
foreach(folder ${PREFIX} ${PREFIX}.staged)
  file(REMOVE_RECURSE ${folder})
endforeach()
foreach(component IN LISTS COMPONENTS)
  execute_process(
    COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${PREFIX}.staged --component ${component}
    OUTPUT_QUIET
    COMMAND_ERROR_IS_FATAL ANY
  )
endforeach()
file(RENAME ${PREFIX}.staged ${PREFIX})

file(GLOB_RECURSE installed ${PREFIX}/*.cmake ${PREFIX}/*.so ${PREFIX}/bin/*)
foreach(file IN LISTS installed)
  foreach(folder ${BUILD}/lib ${PREFIX}.staged)
    # Escapes the characters of a folder's name that are special in regular expressions.
    string(REGEX REPLACE "([][+.*()^$?|\\])" "\\\\\\1" pattern "${folder}")
    file(STRINGS ${file} lines REGEX "${pattern}" LIMIT_COUNT 1)
    if(lines)
      message(FATAL_ERROR "${file} names ${folder}")
    endif()
  endforeach()
endforeach()
