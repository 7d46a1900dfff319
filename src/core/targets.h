#ifndef GNOMON_SRC_CORE_TARGETS_H_
#define GNOMON_SRC_CORE_TARGETS_H_

namespace gnomon {

// Chooses the best instruction set, or the one of GNOMON_TARGET, the first time it is called.
void ChooseTargetOnce();

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_TARGETS_H_
