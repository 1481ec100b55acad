use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::types::shown;

/// One request of a workload. Other fields of its line are ignored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkloadItem {
    /// Its name, unique in the workload.
    pub id: String,
    /// What it is about, for the `domain` oracle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// The prompt's text.
    pub prompt: String,
    /// Tokens to generate at most, at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
}

/// Why a workload was refused: the file, the line and what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkloadError {
    /// The file could not be read.
    #[error("the workload {} cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is not text.
    #[error("{}, line {line}: not UTF-8; save the workload as UTF-8", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
    /// A line is not a request.
    #[error("{}, line {line}: {message}; a line is {{\"id\", \"domain\"?, \"prompt\", \"max_tokens\"?}}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        message: String,
    },
    /// Two requests have one id.
    #[error("{}, line {line}: id \"{}\" is that of line {first}; give each request its own", path.display(), shown(id))]
    DuplicateId {
        /// The file.
        path: PathBuf,
        /// The line of the second, from 1.
        line: usize,
        /// The line of the first.
        first: usize,
        /// Their id.
        id: String,
    },
    /// The file holds no requests.
    #[error("the workload {} is empty; it needs at least one line", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// Reads the workload file at `path`: JSON lines, one request each.
pub fn read(path: &Path) -> Result<Vec<WorkloadItem>, WorkloadError> {
    let bytes = fs::read(path).map_err(|source| WorkloadError::Read { path: path.to_owned(), source })?;
    parse(&bytes, path)
}

/// The requests in `bytes`, the content of the file `path` (named in errors).
///
/// A byte order mark, CRLF line ends and blank lines are tolerated.
pub fn parse(bytes: &[u8], path: &Path) -> Result<Vec<WorkloadItem>, WorkloadError> {
    let text = str::from_utf8(bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        WorkloadError::NotUtf8 { path: path.to_owned(), line: before.split(|&byte| byte == b'\n').count() }
    })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut items: Vec<WorkloadItem> = Vec::new();
    let mut line_of: BTreeMap<String, usize> = BTreeMap::new();
    for (line, content) in (1..).zip(text.lines()).filter(|(_, content)| !content.trim().is_empty()) {
        let item =
            parse_line(content).map_err(|message| WorkloadError::Malformed { path: path.to_owned(), line, message })?;
        if let Some(first) = line_of.insert(item.id.clone(), line) {
            return Err(WorkloadError::DuplicateId { path: path.to_owned(), line, first, id: item.id });
        }
        items.push(item);
    }
    if items.is_empty() {
        return Err(WorkloadError::Empty { path: path.to_owned() });
    }
    Ok(items)
}

fn parse_line(line: &str) -> Result<WorkloadItem, String> {
    // serde would take an array of the fields' values too.
    if !line.trim_start().starts_with('{') {
        return Err("not a JSON object".to_owned());
    }
    let item: WorkloadItem = serde_json::from_str(line).map_err(|error| {
        // serde_json ends with its own line, which is always 1 here.
        let text = error.to_string();
        let what = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
        format!("{} at column {}", shown(what), error.column())
    })?;
    match &item {
        WorkloadItem { id, .. } if id.is_empty() => Err("the id is empty".to_owned()),
        WorkloadItem { prompt, .. } if prompt.trim().is_empty() => Err("the prompt is empty".to_owned()),
        WorkloadItem { max_tokens: Some(0), .. } => Err("max_tokens is 0, which must be at least 1".to_owned()),
        _ => Ok(item),
    }
}

/// The first `n` requests of `items` (not empty), starting again from the first when they run out.
///
/// From the second time round an id gets `#2`, `#3` and so on, so that ids stay unique.
pub fn take(items: &[WorkloadItem], n: usize) -> Vec<WorkloadItem> {
    assert!(!items.is_empty() || n == 0, "{n} requests of an empty workload");
    let mut ids: BTreeSet<String> = items.iter().map(|item| item.id.clone()).collect();
    let mut taken = items[..n.min(items.len())].to_vec();
    for i in items.len()..n {
        let mut item = items[i % items.len()].clone();
        item.id = format!("{}#{}", item.id, i / items.len() + 1);
        while !ids.insert(item.id.clone()) {
            item.id.push('\'');
        }
        taken.push(item);
    }
    taken
}

/// The labels of `items`, sorted, each once.
pub fn domains(items: &[WorkloadItem]) -> Vec<String> {
    let labels: BTreeSet<&String> = items.iter().filter_map(|item| item.domain.as_ref()).collect();
    labels.into_iter().cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<WorkloadItem>, String> {
        parse(text.as_bytes(), Path::new("w.jsonl")).map_err(|error| error.to_string())
    }

    fn ids(items: &[WorkloadItem]) -> Vec<&str> {
        items.iter().map(|item| item.id.as_str()).collect()
    }

    #[test]
    fn lines_become_requests() {
        let text = "\u{feff}{\"id\":\"a\",\"prompt\":\"x\\ny\",\"domain\":\"code\",\"max_tokens\":5}\r\n\r\n\
                    {\"id\":\"b\",\"prompt\":\"\u{43f}\",\"domain\":null,\"tags\":[1]}\r\n";
        let items = parsed(text).expect("two requests");
        let a =
            WorkloadItem { id: "a".into(), domain: Some("code".into()), prompt: "x\ny".into(), max_tokens: Some(5) };
        let b = WorkloadItem { id: "b".into(), domain: None, prompt: "\u{43f}".into(), max_tokens: None };
        assert_eq!(items, [a, b]);
        assert_eq!(domains(&items), ["code"]);
    }

    #[test]
    fn bad_lines_are_named() {
        let shape = "; a line is {\"id\", \"domain\"?, \"prompt\", \"max_tokens\"?}";
        let good = "{\"id\":\"a\",\"prompt\":\"x\"}\n";
        for (line, want) in [
            ("{\"id\":\"b\"}", "missing field `prompt` at column 10"),
            ("{\"id\":\"b\",", "EOF while parsing a value at column 10"),
            ("[\"b\",null,\"x\",1]", "not a JSON object"),
            ("id,prompt", "not a JSON object"),
            ("{\"id\":\"b\",\"prompt\":\" \"}", "the prompt is empty"),
            ("{\"id\":\"\",\"prompt\":\"x\"}", "the id is empty"),
            ("{\"id\":\"b\",\"prompt\":\"x\",\"max_tokens\":0}", "max_tokens is 0, which must be at least 1"),
            ("{\"id\":\"b\",\"prompt\":\"x\"} {}", "trailing characters at column 25"),
        ] {
            assert_eq!(parsed(&format!("{good}\n{line}\n")), Err(format!("w.jsonl, line 3: {want}{shape}")));
        }
        let negative = parsed("{\"id\":\"b\",\"prompt\":\"x\",\"max_tokens\":-1}").expect_err("a negative count");
        assert!(
            negative.starts_with("w.jsonl, line 1: invalid value: integer `-1`, expected u32 at column"),
            "{negative}"
        );
    }

    #[test]
    fn duplicates_empty_files_and_other_encodings_are_refused() {
        let twice =
            "{\"id\":\"a\",\"prompt\":\"x\"}\n{\"id\":\"b\",\"prompt\":\"x\"}\n{\"id\":\"a\",\"prompt\":\"y\"}\n";
        let want = "w.jsonl, line 3: id \"a\" is that of line 1; give each request its own";
        assert_eq!(parsed(twice), Err(want.into()));
        for empty in ["", "\u{feff}", "\n \r\n"] {
            assert_eq!(parsed(empty), Err("the workload w.jsonl is empty; it needs at least one line".into()));
        }
        let latin1 = b"{\"id\":\"a\",\"prompt\":\"x\"}\n{\"id\":\"b\",\"prompt\":\"caf\xe9\"}\n";
        let error = parse(latin1, Path::new("w.jsonl")).expect_err("not UTF-8").to_string();
        assert_eq!(error, "w.jsonl, line 2: not UTF-8; save the workload as UTF-8");
        let error = read(Path::new("no/such/file.jsonl")).expect_err("no file").to_string();
        assert!(error.starts_with("the workload no/such/file.jsonl cannot be read: "), "{error}");
    }

    #[test]
    fn a_file_is_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("w.jsonl");
        fs::write(&path, "{\"id\":\"a\",\"prompt\":\"x\"}").expect("written");
        assert_eq!(ids(&read(&path).expect("a request")), ["a"]);
    }

    #[test]
    fn cycled_requests_keep_unique_ids() {
        let item = |id: &str| WorkloadItem { id: id.into(), domain: None, prompt: "x".into(), max_tokens: None };
        let items = [item("a"), item("b"), item("a#3")];
        assert_eq!(ids(&take(&items, 2)), ["a", "b"]);
        assert_eq!(ids(&take(&items, 8)), ["a", "b", "a#3", "a#2", "b#2", "a#3#2", "a#3'", "b#3"]);
        assert!(take(&[], 0).is_empty());
    }
}
