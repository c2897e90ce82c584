; What a kernel calls of NCCL, in terms that Rust can state: integers and pointers, one thread, one rail.
;
; NCCL's bitcode takes structs by value as pointers marked `byval`, and returns them as first-class values. A Rust caller would pass
; arrays of integers instead: that links, since all pointers are alike, but the call's type is not the function's, and
; LLVM then neither inlines it nor folds the back ends that it does not use. Here the types are NCCL's own, and what is alike
; for every call of ours is made here, where LLVM sees through it: NCCL's view of a context, the team of all ranks of the
; communicator, the calling thread as the only one that calls.
;
; `cargo xtask ptx --nccl` compares every `declare` and every type below with NCCL's own.

%struct.ncclTeam = type { i32, i32, i32 }
%"struct.ncclCoopAny::Storage" = type { [16 x i8] }
%struct.ncclCoopAny = type { %"struct.ncclCoopAny::Storage", ptr }

; ncclGin_C: 48 bytes. NCCL's functions take it by address alone.
%net = type [6 x i64]

; NCCL's bit of the network below. The build of a module defines it: all other networks' code folds away.
@nccl_gin_backend_mask = external constant i32

declare void @ncclGin_C_initWithResourceSharingMode(ptr, i32, ptr, i32, i8 zeroext)
declare void @ncclCoopAnyInitThread(ptr)
declare %struct.ncclTeam @ncclTeamWorld(ptr)
declare void @ncclGinPut_v3(ptr, ptr byval(%struct.ncclTeam), i32, ptr, i64, ptr, i64, i64, i32, ptr, i64, i32, i1 zeroext, i32, i64, i1 zeroext, i32, ptr byval(%struct.ncclCoopAny), i1 zeroext, ptr, i32, i32, i32, i32)
declare void @ncclGinSignal_v3(ptr, ptr byval(%struct.ncclTeam), i32, i32, ptr, i64, i32, i1 zeroext, i32, i64, ptr byval(%struct.ncclCoopAny), i1 zeroext, ptr, i32, i32, i32)
declare i32 @ncclGinFlushTimeout(ptr, ptr byval(%struct.ncclCoopAny), i32, i1 zeroext, ptr, i64)
declare i64 @ncclGinReadSignalVA(ptr, ptr, i64, i32, i32)

; A context, shared with any other thread and kernel of the GPU (sharing mode 0).
define internal void @open(ptr %net, ptr %comm, i32 %context) alwaysinline {
  %mask = load i32, ptr @nccl_gin_backend_mask, align 4
  call void @ncclGin_C_initWithResourceSharingMode(ptr %net, i32 %mask, ptr %comm, i32 %context, i8 zeroext 0)
  ret void
}

; A put between device memory, with a signal or without. No counter, no descriptor, no options.
define void @nccl_gin_put(ptr %comm, i32 %context, i32 %peer, ptr %destination, i64 %destination_offset, ptr %source, i64 %source_offset, i64 %bytes, i32 %signal_type, ptr %signal_window, i64 %signal_offset, i1 zeroext %is_strong, i32 %signal_op, i64 %signal_argument, i32 %given_release, i32 %required_release) alwaysinline convergent {
  %net = alloca %net, align 8
  %team = alloca %struct.ncclTeam, align 4
  %coop = alloca %struct.ncclCoopAny, align 8
  call void @open(ptr %net, ptr %comm, i32 %context)
  %world = call %struct.ncclTeam @ncclTeamWorld(ptr %comm)
  store %struct.ncclTeam %world, ptr %team, align 4
  call void @ncclCoopAnyInitThread(ptr %coop)
  call void @ncclGinPut_v3(ptr %net, ptr byval(%struct.ncclTeam) %team, i32 %peer, ptr %destination, i64 %destination_offset, ptr %source, i64 %source_offset, i64 %bytes, i32 %signal_type, ptr %signal_window, i64 %signal_offset, i32 0, i1 zeroext %is_strong, i32 %signal_op, i64 %signal_argument, i1 zeroext false, i32 0, ptr byval(%struct.ncclCoopAny) %coop, i1 zeroext false, ptr null, i32 %given_release, i32 %required_release, i32 0, i32 0)
  ret void
}

; A signal alone.
define void @nccl_gin_signal(ptr %comm, i32 %context, i32 %peer, i32 %signal_type, ptr %signal_window, i64 %signal_offset, i1 zeroext %is_strong, i32 %signal_op, i64 %signal_argument, i32 %given_release, i32 %required_release) alwaysinline convergent {
  %net = alloca %net, align 8
  %team = alloca %struct.ncclTeam, align 4
  %coop = alloca %struct.ncclCoopAny, align 8
  call void @open(ptr %net, ptr %comm, i32 %context)
  %world = call %struct.ncclTeam @ncclTeamWorld(ptr %comm)
  store %struct.ncclTeam %world, ptr %team, align 4
  call void @ncclCoopAnyInitThread(ptr %coop)
  call void @ncclGinSignal_v3(ptr %net, ptr byval(%struct.ncclTeam) %team, i32 %peer, i32 %signal_type, ptr %signal_window, i64 %signal_offset, i32 0, i1 zeroext %is_strong, i32 %signal_op, i64 %signal_argument, ptr byval(%struct.ncclCoopAny) %coop, i1 zeroext false, ptr null, i32 %given_release, i32 %required_release, i32 0)
  ret void
}

; A flush that gives up after so many cycles. No descriptor.
define i32 @nccl_gin_flush_timeout(ptr %comm, i32 %context, i32 %order, i64 %cycles) alwaysinline convergent {
  %net = alloca %net, align 8
  %coop = alloca %struct.ncclCoopAny, align 8
  call void @open(ptr %net, ptr %comm, i32 %context)
  call void @ncclCoopAnyInitThread(ptr %coop)
  %result = call i32 @ncclGinFlushTimeout(ptr %net, ptr byval(%struct.ncclCoopAny) %coop, i32 %order, i1 zeroext false, ptr null, i64 %cycles)
  ret i32 %result
}

; The lowest bits of a signal of the caller's own window.
define i64 @nccl_gin_read_signal(ptr %comm, ptr %signal_window, i64 %signal_offset, i32 %bits, i32 %order) alwaysinline convergent {
  %net = alloca %net, align 8
  call void @open(ptr %net, ptr %comm, i32 0)
  %value = call i64 @ncclGinReadSignalVA(ptr %net, ptr %signal_window, i64 %signal_offset, i32 %bits, i32 %order)
  ret i64 %value
}
