//! Holds the documentation to its word: every public type is used in an example that is compiled.
//!
//! Reads the sources as text; that the examples run is what `cargo test --doc` shows.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// The program, what is public for it alone, and what is C's: their examples are commands and programs.
const ELSEWHERE: [&str; 4] = ["bench", "capi", "cli", "main"];

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn sources(dir: &Path) -> Vec<(String, String)> {
    let mut files = Vec::new();
    let mut dirs = vec![dir.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(src()).expect("under src").to_string_lossy().replace('\\', "/");
                files.push((name, fs::read_to_string(&path).expect("a readable source")));
            }
        }
    }
    files.sort();
    files
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// The names of every `pub use` of a text.
fn reexported(text: &str) -> BTreeSet<&str> {
    let uses = text.split("\npub use ").skip(1).map(|rest| rest.split(';').next().unwrap_or(rest));
    uses.flat_map(|list| words(list.rsplit("::").next().unwrap_or(list)).chain(words(list))).collect()
}

/// The type that a line declares, if it is public.
fn declared(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("pub ")?;
    let (kind, rest) = rest.split_once(' ')?;
    ["struct", "enum", "trait"].contains(&kind).then(|| words(rest).next())?
}

/// The lines of Rust in a text's documentation, those that are hidden on the page included.
fn examples(text: &str) -> String {
    let mut code = String::new();
    let mut is_code = None;
    for line in text.lines() {
        let Some(doc) = line.trim_start().strip_prefix("///").or_else(|| line.strip_prefix("//!")) else {
            is_code = None;
            continue;
        };
        match (doc.trim_start().strip_prefix("```"), is_code) {
            (Some(_), Some(_)) => is_code = None,
            (Some(fence), None) => is_code = Some(fence.is_empty() || fence == "no_run"),
            (None, Some(true)) => code.extend([doc, "\n"]),
            (None, _) => {}
        }
    }
    code
}

#[test]
fn every_public_type_is_used_in_an_example() {
    let files = sources(&src());
    let code: String = files.iter().map(|(_, text)| examples(text)).collect();
    let used: BTreeSet<&str> = words(&code).collect();
    let mut roots: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (name, text) in &files {
        let module = name.split('/').next().unwrap_or(name).trim_end_matches(".rs");
        roots.entry(module).or_default().extend(reexported(text));
    }
    let mut n_types = 0;
    let mut missing = Vec::new();
    for (name, text) in &files {
        let module = name.split('/').next().unwrap_or(name).trim_end_matches(".rs");
        let is_whole = name.ends_with("mod.rs") || !name.contains('/');
        for line in text.lines() {
            let Some(found) = declared(line) else { continue };
            if ELSEWHERE.contains(&module) || !(is_whole || roots[module].contains(found)) {
                continue;
            }
            n_types += 1;
            if !used.contains(found) {
                missing.push(format!("src/{name}: {found}"));
            }
        }
    }
    assert!(n_types > 150, "{n_types} public types were found");
    assert!(missing.is_empty(), "no example uses these; show how they are used:\n{}", missing.join("\n"));
}

#[test]
fn what_the_root_exports_has_an_example_of_its_own() {
    let files = sources(&src());
    let root = fs::read_to_string(src().join("lib.rs")).expect("a readable source");
    let exported = reexported(&root);
    let mut n_found = 0;
    for (name, text) in files.iter().filter(|(name, _)| name.contains('/')) {
        let mut doc = String::new();
        for line in text.lines() {
            if line.starts_with("///") {
                doc.extend([line, "\n"]);
            } else if !line.starts_with("#[") {
                if let Some(found) = declared(line).filter(|found| exported.contains(found)) {
                    // A C struct may have the name of what it stands for.
                    if !name.starts_with("capi/") {
                        n_found += 1;
                        assert!(!examples(&doc).is_empty(), "src/{name}: {found} has no example");
                    }
                }
                doc.clear();
            }
        }
    }
    assert!(n_found >= 9, "{n_found} of the root's exports were found");
}

#[test]
fn examples_are_told_from_other_blocks() {
    let text = "/// Words.\n///\n/// ```\n/// use a::B;\n/// # hidden(C);\n/// ```\n///\n/// ```text\n/// D\n/// ```\npub struct B;\n";
    assert_eq!(words(&examples(text)).collect::<Vec<_>>(), ["use", "a", "B", "hidden", "C"]);
    assert_eq!(
        (declared("pub struct B;"), declared("pub(super) enum B {"), declared("pub fn b() {")),
        (Some("B"), None, None)
    );
    assert!(reexported("\npub use a::{B, c::D};").is_superset(&["B", "D"].into()));
}
