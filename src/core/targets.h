#ifndef GNOMON_SRC_CORE_TARGETS_H_
#define GNOMON_SRC_CORE_TARGETS_H_

namespace gnomon {

// On the first call, selects the best instruction set or the one named by GNOMON_TARGET.
void ChooseTargetOnce();

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_TARGETS_H_
