//! Holds the floors of the house: who may use whom, where `unsafe` may stand, how long a file may be.
//!
//! Reads the sources as text; unit tests at a file's foot may use what they like, but not `unsafe`.

use std::{
    fs,
    path::{Path, PathBuf},
};

const MAX_LINES: usize = 500;

const BASE: &[&str] = &["types", "rng"];
const POLICY: &[&str] =
    &["signature", "kv", "calibrate", "route", "schedule", "metrics", "sim", "trace", "refit", "figures"];
const FFI: &[&str] = &["llama"];
const ENGINE: &[&str] = &["engine"];
const FRONTS: &[&str] = &["server", "cli", "bench", "capi", "gateway"];
/// The crate-wide error: made of every floor's own, so only the fronts and the root use it.
const ERROR: &[&str] = &["error"];
/// The root puts the floors together.
const ROOT: &[&str] = &["lib", "main"];

/// What the policy floor never touches: it has no clock, no threads of its own, no files, no network, no log.
const IMPURE: &[&str] = &[
    "log",
    "crossbeam",
    "parking_lot",
    "async_channel",
    "std::env",
    "std::fs",
    "std::net",
    "std::process",
    "std::thread",
    "std::time::Instant",
    "std::time::SystemTime",
];
const SYS_CRATE: &str = "llama_cpp_sys_2";

#[test]
fn the_sources_keep_to_their_floors() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&src, &mut files);
    assert!(files.len() > 10, "{} sources under {}", files.len(), src.display());
    let mut faults = Vec::new();
    for file in &files {
        let text = fs::read_to_string(file).expect("a readable source");
        let name = file.strip_prefix(&src).expect("under src").to_string_lossy().replace('\\', "/");
        faults.extend(check(&name, &text));
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(dir).expect("a directory").map(|e| e.expect("an entry").path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// What is wrong with the source `name` (its path below `src`).
fn check(name: &str, text: &str) -> Vec<String> {
    let module = name.split('/').next().unwrap_or(name).trim_end_matches(".rs");
    let mut faults = Vec::new();
    let n_lines = text.lines().count();
    if n_lines > MAX_LINES {
        faults.push(format!("src/{name}: {n_lines} lines; split it, the most is {MAX_LINES}"));
    }
    let tokens = tokenise(text);
    if tokens.iter().any(|token| token == "unsafe") && !["llama", "capi"].contains(&module) {
        faults.push(format!("src/{name}: `unsafe` outside src/llama and src/capi"));
    }
    let Some(allowed) = may_use(module) else {
        faults.push(format!("src/{name}: module `{module}` is on no floor; give it one in tests/floors.rs"));
        return faults;
    };
    // How many `super` lead from this file to the crate root.
    let depth = name.trim_end_matches("/mod.rs").split('/').count();
    for path in paths(without_tests(&tokens)) {
        let parts: Vec<&str> = path.iter().map(String::as_str).collect();
        let to_root = parts.iter().take_while(|&&part| part == "super").count() >= depth;
        let full = parts.join("::");
        match parts[..] {
            ["super", ..] if to_root => faults.push(format!("src/{name}: `{full}` leaves its folder; write `crate::`")),
            ["crate" | "eldr", used, ..] if used.starts_with(char::is_uppercase) && !ROOT.contains(&module) => {
                faults.push(format!("src/{name}: `{full}` is the root's; write the module it comes from"));
            }
            ["crate" | "eldr", used, ..]
                if is_module(used) && used != module && !allowed.iter().any(|floor| floor.contains(&used)) =>
            {
                faults.push(format!("src/{name}: `{module}` may not use `{full}`"));
            }
            [SYS_CRATE, ..] if module != "llama" => {
                faults.push(format!("src/{name}: `{full}`; only `llama` talks to llama.cpp"));
            }
            _ if is_pure(module) && IMPURE.iter().any(|impure| starts_with(&parts, impure)) => {
                faults.push(format!("src/{name}: `{full}`; `{module}` has no clock, thread, file, network or log"));
            }
            _ => {}
        }
    }
    faults
}

/// The floors whose modules `module` may use besides itself; nothing if it is on no floor.
fn may_use(module: &str) -> Option<Vec<&'static [&'static str]>> {
    let is_on = |floor: &[&str]| floor.contains(&module);
    Some(match module {
        _ if is_on(BASE) || is_on(FFI) => vec![BASE],
        _ if is_on(POLICY) => vec![BASE, POLICY],
        _ if is_on(ENGINE) => vec![BASE, POLICY, FFI],
        "cli" => vec![BASE, POLICY, ENGINE, ERROR, FRONTS],
        _ if is_on(FRONTS) => vec![BASE, POLICY, ENGINE, ERROR],
        _ if is_on(ERROR) => vec![BASE, POLICY, FFI, ENGINE],
        _ if is_on(ROOT) => vec![BASE, POLICY, FFI, ENGINE, FRONTS, ERROR],
        _ => return None,
    })
}

fn is_module(name: &str) -> bool {
    [BASE, POLICY, FFI, ENGINE, FRONTS, ERROR].iter().any(|floor| floor.contains(&name))
}

fn is_pure(module: &str) -> bool {
    BASE.contains(&module) || POLICY.contains(&module)
}

fn starts_with(parts: &[&str], path: &str) -> bool {
    let mut parts = parts.iter();
    path.split("::").all(|want| parts.next() == Some(&want))
}

/// The tokens before `#[cfg(test)] mod ..` at the file's foot.
fn without_tests(tokens: &[String]) -> &[String] {
    let opening = ["#", "[", "cfg", "(", "test", ")", "]"];
    let is_tests = |at: usize| {
        let after = tokens[at + opening.len()..]
            .iter()
            .find(|token| !["pub", "(", "in", "super", "crate", ")"].contains(&token.as_str()));
        tokens[at..].iter().zip(opening).all(|(token, want)| token == want) && after.is_some_and(|token| token == "mod")
    };
    let end = (0..tokens.len().saturating_sub(opening.len())).find(|&at| is_tests(at));
    &tokens[..end.unwrap_or(tokens.len())]
}

/// Every path of at least two parts, in code and in `use` trees, written out.
fn paths(tokens: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if tokens[at] == "use" {
            at = use_tree(tokens, at + 1, &[], &mut found);
        } else if is_word(&tokens[at]) {
            let mut path = vec![tokens[at].clone()];
            while at + 2 < tokens.len() && tokens[at + 1] == "::" && is_word(&tokens[at + 2]) {
                path.push(tokens[at + 2].clone());
                at += 2;
            }
            if path.len() > 1 {
                found.push(path);
            }
            at += 1;
        } else {
            at += 1;
        }
    }
    found
}

/// Adds the paths of the `use` tree that starts at `at` below `prefix`; returns where it ends.
fn use_tree(tokens: &[String], mut at: usize, prefix: &[String], found: &mut Vec<Vec<String>>) -> usize {
    let mut path = prefix.to_vec();
    while at < tokens.len() {
        match tokens[at].as_str() {
            "::" => at += 1,
            "{" => {
                at += 1;
                while at < tokens.len() && tokens[at] != "}" {
                    at = use_tree(tokens, at, &path, found);
                    at += usize::from(tokens.get(at).is_some_and(|token| token == ","));
                }
                return at + 1;
            }
            "as" => at += 2,
            word if is_word(word) || word == "*" => {
                path.push(word.to_owned());
                at += 1;
            }
            _ => break,
        }
    }
    found.push(path);
    at
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Words, `::` and single characters; comments, strings and characters are left out.
fn tokenise(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        let rest = &chars[at..];
        at += match rest {
            ['/', '/', ..] => rest.iter().take_while(|&&c| c != '\n').count(),
            ['/', '*', ..] => block_comment(rest),
            ['r', '"', ..] | ['r', '#', '"' | '#', ..] => raw_string(&rest[1..]) + 1,
            ['b', 'r', '"' | '#', ..] => raw_string(&rest[2..]) + 2,
            ['"', ..] => quoted(rest, '"'),
            ['\'', '\\', ..] | ['\'', _, '\'', ..] => quoted(rest, '\''),
            [':', ':', ..] => {
                tokens.push("::".to_owned());
                2
            }
            [c, ..] if is_part(*c) => {
                let word: String = rest.iter().copied().take_while(|&c| is_part(c)).collect();
                let length = word.chars().count();
                tokens.push(word);
                length
            }
            [c, ..] => {
                if !c.is_whitespace() {
                    tokens.push(c.to_string());
                }
                1
            }
            [] => 1,
        };
    }
    tokens
}

/// The length of a block comment, which may hold others.
fn block_comment(rest: &[char]) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        match rest[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// The length of a literal between two `quote`s, in which a backslash protects the next character.
fn quoted(rest: &[char], quote: char) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

/// The length of a raw string from its first `#` or quote on.
fn raw_string(rest: &[char]) -> usize {
    let hashes = rest.iter().take_while(|&&c| c == '#').count();
    let closes = |at: usize| rest[at] == '"' && rest[at + 1..].iter().take_while(|&&c| c == '#').count() >= hashes;
    (hashes + 1..rest.len()).find(|&at| closes(at)).map_or(rest.len(), |at| at + 1 + hashes)
}

#[test]
fn planted_violations_are_found() {
    let bad = [
        ("types/ids.rs", "use crate::route::Decision;", "`types` may not use `crate::route::Decision`"),
        ("route/band.rs", "use crate::{\n    rng::Rng,\n    engine::{Engine},\n};", "`crate::engine::Engine`"),
        (
            "route/band.rs",
            "fn f() { let x = crate::llama::Model::load(); }",
            "`route` may not use `crate::llama::Model::load`",
        ),
        ("route/band.rs", "use std::{sync::Arc, time::{Duration, Instant}};", "`std::time::Instant`"),
        ("route/band.rs", "fn f() { log::info!(\"x\") }", "`log::info`"),
        ("route/band.rs", "use std::fs;", "`std::fs`"),
        ("route/band.rs", "use std::thread as t;", "`std::thread`"),
        ("route/band.rs", "use super::super::engine::Engine;", "write `crate::`"),
        ("rng.rs", "use super::route::Decision;", "write `crate::`"),
        ("route/mod.rs", "use super::engine::Engine;", "write `crate::`"),
        ("route/band.rs", "fn f() { unsafe { g() } }", "`unsafe` outside"),
        ("engine/mod.rs", "mod tests { fn f() { unsafe { g() } } }", "`unsafe` outside"),
        ("engine/mod.rs", "use llama_cpp_sys_2::llama_decode;", "only `llama`"),
        ("engine/mod.rs", "use crate::server::App;", "`engine` may not use"),
        ("llama/tap.rs", "use crate::signature::ExpertCounts;", "`llama` may not use"),
        ("bench/run.rs", "use crate::llama::Model;", "`bench` may not use"),
        ("bench/run.rs", "pub use crate::cli::Args;", "`bench` may not use"),
        ("server/mod.rs", "use eldr::bench::chart;", "`server` may not use"),
        ("cli/run.rs", "use crate::llama::Model;", "`cli` may not use"),
        ("route/band.rs", "use crate::Engine;", "is the root's"),
        ("extras/mod.rs", "", "is on no floor"),
    ];
    for (name, text, want) in bad {
        let faults = check(name, text);
        assert!(faults.len() == 1 && faults[0].contains(want), "{name}: {text}: {faults:?}");
    }
    let long = check("route/band.rs", &"\n".repeat(501));
    assert!(long.len() == 1 && long[0].contains("501 lines"), "{long:?}");
}

#[test]
fn what_is_allowed_is_not_faulted() {
    let good = [
        ("route/band.rs", "use crate::{rng::Rng, types::WorkerId, signature::Signature};\nuse std::time::Duration;"),
        ("route/band.rs", "use super::policy::Decision; fn f() { self::g(); super::h() }"),
        (
            "route/band.rs",
            "// use crate::engine::Engine;\n/* unsafe /* std::fs */ */ fn f() { \"std::fs unsafe\"; r#\"log::x \"unsafe\"\"#; }",
        ),
        (
            "route/band.rs",
            "fn f<'a>(x: &'a str) -> char { let log = 1; '\"' }\n#[cfg(test)]\nmod tests { use std::fs; use super::super::x; }",
        ),
        ("route/load.rs", "#[cfg(test)]\npub(super) mod tests { use crate::engine::Engine; }"),
        ("llama/raw.rs", "use llama_cpp_sys_2 as sys; fn f() { unsafe { sys::llama_decode() } }"),
        ("engine/mod.rs", "use crate::{llama::Model, schedule::ModelRunner}; use std::thread;"),
        ("cli/bench.rs", "use crate::{bench::table, server::App, engine::Engine};"),
        ("bench/run.rs", "use crate::{engine::Engine, error::Error, route::PolicyKind};"),
        ("lib.rs", "pub use crate::llama::Model;"),
        ("main.rs", "use eldr::Engine;"),
    ];
    for (name, text) in good {
        assert_eq!(check(name, text), Vec::<String>::new(), "{name}: {text}");
    }
    let impure_before_tests = "use std::fs;\n#[cfg(test)]\nmod tests {}";
    assert_eq!(check("route/band.rs", impure_before_tests).len(), 1);
}
