//! The committed header is what the sources say, and C and C++ compilers take it.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

const HEADER: &str = "src/capi/eldr.h";

/// The sources, in the order the header has.
const SOURCES: &[&str] = &[
    "info",
    "status",
    "failure",
    "logging",
    "handles",
    "calibration",
    "counts",
    "signature",
    "layout",
    "tap",
    "tap_call",
    "cache",
    "event",
    "router",
    "placement",
    "engine_params",
    "engine",
    "control",
    "callback",
    "submit",
    "request",
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn generated() -> String {
    let config = cbindgen::Config::from_file(root().join("src/capi/cbindgen.toml")).unwrap();
    let builder = SOURCES.iter().fold(cbindgen::Builder::new().with_config(config), |builder, name| {
        builder.with_src(root().join(format!("src/capi/{name}.rs")))
    });
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    // cbindgen has no opaque type that is declared elsewhere.
    String::from_utf8(text).unwrap()
}

#[test]
fn the_header_is_current() {
    let (path, text) = (root().join(HEADER), generated());
    if env::var_os("ELDR_WRITE_HEADER").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == text,
        "{HEADER} is not what src/capi says; write it by `ELDR_WRITE_HEADER=1 cargo test --release --features capi \
         --test capi header`"
    );
}

/// Every `extern "C"` function of the sources.
fn functions() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(root().join("src/capi")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let found = text
                .split("extern \"C\" fn eldr_")
                .skip(1)
                .map(|rest| format!("eldr_{}", rest.split('(').next().unwrap()));
            names.extend(found);
        }
    }
    names
}

#[test]
fn every_function_is_in_the_header_with_a_comment() {
    let text = fs::read_to_string(root().join(HEADER)).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let names = functions();
    assert!(names.len() > 40, "{names:?}");
    for name in names {
        let call = format!("{name}(");
        let at = lines.iter().position(|line| !line.trim_start().starts_with("//") && line.contains(&call));
        let at = at.unwrap_or_else(|| panic!("{name} is not in {HEADER}; name its file in tests/capi/header.rs"));
        assert!(lines[at - 1].starts_with("//"), "{name} has no comment");
        let says_threads =
            lines[..at].iter().rev().take_while(|line| line.starts_with("//")).any(|line| line.contains("thread"));
        assert!(says_threads, "{name} does not say which thread may call it");
    }
}

#[test]
fn c_and_cpp_compilers_take_the_header() {
    let folder = tempfile::tempdir().unwrap();
    let program = "#include \"eldr.h\"\nint main(void) { return (int) eldr_abi_version() - ELDR_ABI_VERSION; }\n";
    let both = "#include \"eldr.hpp\"\nint main() { return eldr::has_engine() ? 0 : 1; }\n";
    let (c, cpp) = (folder.path().join("a.c"), folder.path().join("b.cpp"));
    fs::write(&c, program).unwrap();
    fs::write(&cpp, both).unwrap();
    for (compiler, standard, file) in [("cc", "c11", &c), ("c++", "c++17", &cpp), ("c++", "c++20", &cpp)] {
        compile(compiler, standard, file, &[]);
    }
    compile("c++", "c++17", &cpp, &["-fno-exceptions", "-DELDR_NO_EXCEPTIONS"]);
}

fn compile(compiler: &str, standard: &str, file: &Path, more: &[&str]) {
    let run = Command::new(compiler)
        .arg(format!("-std={standard}"))
        .args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"])
        .args(more)
        .arg("-I")
        .arg(root().join("src/capi"))
        .arg(file)
        .output()
        .unwrap_or_else(|error| panic!("{compiler} does not run: {error}; install a C and C++ compiler"));
    assert!(run.status.success(), "{compiler} -std={standard}:\n{}", String::from_utf8_lossy(&run.stderr));
}
