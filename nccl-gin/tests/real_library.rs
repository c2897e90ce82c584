//! The bindings against NCCL itself: its headers, by a C++ compiler, and its library, as far as no GPU is needed.
//!
//! ```sh
//! TIDE_NCCL_DIR=$(scripts/fetch-nccl.sh) cargo test -p nccl-gin --test real_library -- --ignored
//! ```
//!
//! The headers of any version from 2.28.3 on will do for the first; CUDA's are stood in for, as only pointers to its types matter.

use nccl_gin::host::sys::{self, Declaration};
use nccl_gin::host::{
    Ability, Comm, Config, DevCommLayout, Layout, Library, Memory, NcclError, ResultCode, UniqueId, Version,
};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

const VARIABLE: &str = "TIDE_NCCL_DIR";

fn package() -> PathBuf {
    let folder =
        std::env::var_os(VARIABLE).unwrap_or_else(|| panic!("{VARIABLE} is not set: see scripts/fetch-nccl.sh"));
    PathBuf::from(folder)
}

/// What the headers say their version is.
fn header_version() -> Version {
    let header = std::fs::read_to_string(package().join("include/nccl.h")).unwrap();
    let code = header.lines().find_map(|line| line.strip_prefix("#define NCCL_VERSION_CODE "));
    Version(code.unwrap().trim().parse().unwrap())
}

/// As much of CUDA's headers as NCCL's need in order to be parsed.
const CUDA_HEADERS: [(&str, &str); 5] = [
    (
        "cuda_runtime.h",
        "#pragma once\n#include <stddef.h>\n#include <stdint.h>\n#define CUDART_VERSION 13000\n#define __host__\n#define __device__\n\
         typedef struct CUstream_st* cudaStream_t;\ntypedef struct CUevent_st* cudaEvent_t;\n",
    ),
    ("cuda.h", "#pragma once\ntypedef int CUmemLocationType;\ntypedef unsigned long long CUdeviceptr;\n"),
    (
        "cuda_fp16.h",
        "#pragma once\nstruct __half { unsigned short bits; };\ntypedef __half half;\nstruct __half2 { __half x, y; };\ntypedef __half2 half2;\n",
    ),
    (
        "cuda_bf16.h",
        "#pragma once\nstruct __nv_bfloat16 { unsigned short bits; };\nstruct __nv_bfloat162 { __nv_bfloat16 x, y; };\n",
    ),
    (
        "cuda_fp8.h",
        "#pragma once\nstruct __nv_fp8_e4m3 { unsigned char bits; };\nstruct __nv_fp8_e5m2 { unsigned char bits; };\n\
         struct __nv_fp8x2_e4m3 { unsigned short bits; };\nstruct __nv_fp8x2_e5m2 { unsigned short bits; };\n\
         struct __nv_fp8x4_e4m3 { unsigned bits; };\nstruct __nv_fp8x4_e5m2 { unsigned bits; };\n",
    ),
];

/// Compiles and runs a program of these statements and checks.
fn compile_and_run(name: &str, checks: &str, statements: &str) -> Output {
    let folder = std::env::temp_dir().join(format!("nccl-gin-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for (header, text) in CUDA_HEADERS {
        std::fs::write(folder.join(header), text).unwrap();
    }
    let source = format!(
        "#include <nccl.h>\n#include <nccl_device.h>\n#include <cstddef>\n#include <cstdio>\n#include <cstring>\n#include <type_traits>\n\
         {checks}\nint main() {{\n{statements}\nreturn 0;\n}}\n"
    );
    std::fs::write(folder.join("check.cc"), source).unwrap();
    let mut compiler = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    compiler.args(["-std=c++17", "-w", "-I"]).arg(&folder).arg("-I").arg(package().join("include"));
    let compiled = compiler.arg(folder.join("check.cc")).arg("-o").arg(folder.join("check")).output();
    let compiled = compiled.expect("a C++ compiler");
    let output =
        if compiled.status.success() { Command::new(folder.join("check")).output().unwrap() } else { compiled };
    std::fs::remove_dir_all(&folder).unwrap();
    output
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.clone(), output.stderr.clone()].concat()).into_owned()
}

/// A Rust type of `sys` in C++.
fn in_c(rust: &str) -> String {
    if let Some(pointee) = rust.strip_prefix("*mut ") {
        return format!("{}*", in_c(pointee));
    }
    if let Some(pointee) = rust.strip_prefix("*const ") {
        return format!("{} const*", in_c(pointee));
    }
    match rust {
        "c_int" => "int",
        "c_uint" => "unsigned int",
        "c_char" => "char",
        "c_void" => "void",
        "usize" => "size_t",
        named if named.starts_with("nccl") || named.starts_with("cuda") => named,
        other => panic!("{other} has no name in C++ here"),
    }
    .to_owned()
}

/// A check that the header declares a function as we do.
fn signature(declaration: &Declaration) -> String {
    let Declaration { name, parameters, result } = declaration;
    let parameters: Vec<String> = parameters.iter().map(|p| in_c(p)).collect();
    let (result, parameters) = (in_c(result), parameters.join(", "));
    format!(r#"static_assert(std::is_same<decltype(&::{name}), {result} (*)({parameters})>::value, "{name}");"#)
}

fn declared(version: Version) -> impl Iterator<Item = Declaration> {
    [
        (Ability::Collectives, sys::Core::DECLARATIONS),
        (Ability::Windows, sys::Windows::DECLARATIONS),
        (Ability::Pointers, sys::Pointers::DECLARATIONS),
        (Ability::Properties, sys::Inquiry::DECLARATIONS),
        (Ability::HostRma, sys::HostRma::DECLARATIONS),
        (Ability::DeviceComm, sys::Devices::DECLARATIONS),
    ]
    .into_iter()
    .filter(move |(ability, _)| ability.floor() <= version)
    .flat_map(|(_, declarations)| declarations.iter().copied())
}

fn size_check(name: &str, bytes: usize) -> String {
    format!(r#"static_assert(sizeof({name}) == {bytes}, "size of {name}");"#)
}

fn offset_check(name: &str, field: &str, offset: usize) -> String {
    format!(r#"static_assert(offsetof({name}, {field}) == {offset}, "{name}.{field}");"#)
}

/// Structs, with C's initialiser of each.
const STRUCTS: [(&str, &str); 3] = [
    ("ncclConfig_t", "NCCL_CONFIG_INITIALIZER"),
    ("ncclDevCommRequirements", "NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER"),
    ("ncclCommProperties", "NCCL_COMM_PROPERTIES_INITIALIZER"),
];

#[test]
#[ignore = "needs NCCL's headers: scripts/fetch-nccl.sh"]
fn functions_and_structs_are_those_of_the_headers() {
    let version = header_version();
    let mut checks: Vec<String> = declared(version).map(|declaration| signature(&declaration)).collect();
    let mut statements = Vec::new();
    let mut struct_count = 0;
    for (name, initializer) in STRUCTS {
        let Some(layout) = Layout::of(name, version) else { continue };
        assert_eq!(layout.version(), version, "{name}: the headers are of a version that the tables do not list");
        struct_count += 1;
        checks.push(size_check(name, layout.bytes()));
        checks.extend(layout.offsets().map(|(field, offset)| offset_check(name, field, offset)));
        let bytes: Vec<String> = layout.initial_bytes().iter().map(u8::to_string).collect();
        // Copied field by field into zeroed storage, so that gaps between fields compare equal.
        statements.push(format!(
            "{{ static {name} theirs = {initializer}; static const unsigned char ours[] = {{{}}};\n\
             if (std::memcmp(&theirs, ours, sizeof ours) != 0) {{ std::puts(\"initialiser of {name}\"); return 1; }} }}",
            bytes.join(", ")
        ));
    }
    assert_eq!(struct_count, if version.0 < 22907 { 1 } else { 3 });
    let device_comm = DevCommLayout::written_for(version).expect("a version that the tables list");
    checks.push(size_check("ncclDevComm", device_comm.bytes));
    let fields = [
        ("rank", Some(device_comm.rank)),
        ("nRanks", Some(device_comm.rank_count)),
        ("lsaRank", Some(device_comm.lsa_rank)),
        ("lsaSize", Some(device_comm.lsa_size)),
        ("ginContextCount", device_comm.context_count),
    ];
    checks.extend(fields.iter().filter_map(|(field, offset)| Some(offset_check("ncclDevComm", field, (*offset)?))));
    checks.push(size_check("ncclUniqueId", UniqueId::BYTES));
    if Ability::HostRma.floor() <= version {
        checks.push(size_check("ncclWaitSignalDesc_t", size_of::<sys::ncclWaitSignalDesc_t>()));
        checks.push(offset_check("ncclWaitSignalDesc_t", "ctx", std::mem::offset_of!(sys::ncclWaitSignalDesc_t, ctx)));
    }
    checks.extend(enum_checks(version));

    let output = compile_and_run("right", &checks.join("\n"), &statements.join("\n"));
    assert!(output.status.success(), "{}", said(&output));

    // The same checks see a fault.
    let config = Layout::of("ncclConfig_t", version).unwrap();
    let wrong_call =
        Declaration { name: "ncclCommDestroy", parameters: &["ncclComm_t", "c_int"], result: "ncclResult_t" };
    for (planted, complaint) in [
        (signature(&wrong_call), "ncclCommDestroy"),
        (offset_check("ncclConfig_t", "netName", 36), "ncclConfig_t.netName"),
        (size_check("ncclConfig_t", config.bytes() + 8), "size of ncclConfig_t"),
    ] {
        let output = compile_and_run("planted", &planted, "");
        assert!(!output.status.success() && said(&output).contains(complaint), "{planted}: {}", said(&output));
    }
    let mut wrong = config.initial_bytes();
    wrong[20] ^= 1;
    let bytes: Vec<String> = wrong.iter().map(u8::to_string).collect();
    let statement = format!(
        "static ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER; static const unsigned char ours[] = {{{}}};\n\
         return std::memcmp(&theirs, ours, sizeof ours) == 0 ? 0 : 1;",
        bytes.join(", ")
    );
    assert!(!compile_and_run("bytes", "", &statement).status.success());
}

/// Numbers that the bindings use by name.
fn enum_checks(version: Version) -> Vec<String> {
    use nccl_gin::host::{DataType, GinType, ReduceOp, WindowFlags};
    let mut pairs = vec![
        ("ncclInProgress", ResultCode::IN_PROGRESS.0),
        ("ncclRemoteError", ResultCode::REMOTE_ERROR.0),
        ("ncclInvalidUsage", ResultCode::INVALID_USAGE.0),
        ("ncclUint8", DataType::Uint8 as i32),
        ("ncclFloat32", DataType::Float32 as i32),
        ("ncclBfloat16", DataType::Bfloat16 as i32),
        ("ncclAvg", ReduceOp::Average as i32),
        ("NCCL_SPLIT_NOCOLOR", -1),
        ("NCCL_WIN_COLL_SYMMETRIC", WindowFlags::COLL_SYMMETRIC.0),
    ];
    if version.0 >= 23203 {
        pairs.extend([
            ("ncclTimeout", ResultCode::TIMEOUT.0),
            ("NCCL_WIN_STRICT_ORDERING", WindowFlags::STRICT_ORDERING.0),
            ("NCCL_WIN_GIN_ONLY", WindowFlags::GIN_ONLY.0),
            ("NCCL_GIN_TYPE_PROXY", GinType::Proxy.code()),
            ("NCCL_GIN_TYPE_GDAKI", GinType::Gdaki.code()),
            ("NCCL_GIN_TYPE_GPI", GinType::Gpi.code()),
            ("NCCL_GIN_TYPE_EFA_GDA", GinType::EfaGda.code()),
            ("NCCL_GIN_CONNECTION_FULL", 1),
            ("NCCL_GIN_CONNECTION_RAIL", 2),
            ("NCCL_GIN_CONNECTION_CUSTOM_STRIDE", 3),
        ]);
    }
    pairs.iter().map(|(name, value)| format!(r#"static_assert((int)({name}) == {value}, "{name}");"#)).collect()
}

fn library_path() -> PathBuf {
    package().join("lib/libnccl.so.2")
}

#[test]
#[ignore = "needs NCCL's library: scripts/fetch-nccl.sh"]
fn the_library_has_each_function_that_its_version_promises() {
    let path = library_path();
    // SAFETY: NCCL's initialisers start nothing.
    let library = unsafe { libloading::Library::new(&path) }.unwrap();
    let has = |name: &str| {
        // SAFETY: looked up, not called.
        unsafe { library.get::<unsafe extern "C" fn()>(format!("{name}\0").as_bytes()) }.is_ok()
    };
    let missing: Vec<&str> = declared(header_version()).map(|d| d.name).filter(|name| !has(name)).collect();
    assert_eq!(missing, Vec::<&str>::new());
    assert!(!has("ncclNoSuchFunction"), "the check finds what is not there");
    assert_eq!(sys::declarations().count(), declared(Version(u32::MAX)).count());
}

#[test]
#[ignore = "needs NCCL's library: scripts/fetch-nccl.sh"]
fn calls_that_need_no_gpu_work_and_the_others_fail_in_words() {
    let library = Library::open(library_path()).unwrap();
    assert_eq!(library.version(), header_version());
    assert_eq!(library.path(), library_path().canonicalize().unwrap());
    for (ability, reason) in library.lacks() {
        assert!(ability.floor() > library.version(), "{reason}");
    }
    if library.require(Ability::DeviceComm).is_ok() {
        assert!(library.device_bitcode().is_some_and(|path| Path::new(&path).is_file()));
    }
    assert_eq!(library.describe(ResultCode::SUCCESS), "no error");
    assert_ne!(library.describe(ResultCode::INVALID_USAGE), library.describe(ResultCode::SUCCESS));
    let id = UniqueId::new(&library).unwrap();
    assert_ne!(id.to_bytes(), [0; UniqueId::BYTES]);

    // Where there is a GPU these work.
    let config = Config { timeout: Duration::from_secs(60), ..Config::default() };
    for outcome in [Comm::init_rank(&library, id, 1, 0, &config).map(drop), Memory::alloc(&library, 4096).map(drop)] {
        if let Err(error) = outcome {
            assert!(matches!(error, NcclError::Call { .. }), "{error}");
            println!("without a GPU: {error}");
        }
    }
}
