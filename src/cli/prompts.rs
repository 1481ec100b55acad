//! Prompts to record: JSON lines, plain text with a prompt on each line, or either on standard input.
//!
//! Never guesses what a file holds: its name tells. On standard input a `{` at the start means JSON lines.

use std::{
    fs,
    io::{self, Read as _},
    path::Path,
};

use eldr::{
    bench::workload::{self, WorkloadItem},
    engine::{LoadedModel, RecordPrompt},
    types::shown,
};

use super::error::CliError;

/// The prompts in the file `path`: one a line if its name ends in `.txt`, else JSON lines; `-` is standard input.
///
/// A line of text gets the id `NAME:LINE`, NAME being the file's without `.txt`, or `stdin`. Blank lines are left out.
pub fn read(path: &Path) -> Result<Vec<WorkloadItem>, CliError> {
    let shown = path.display();
    if path == Path::new("-") {
        let mut bytes = Vec::new();
        let read = io::stdin().read_to_end(&mut bytes);
        read.map_err(|error| CliError::input(format!("cannot read the prompts from standard input: {error}")))?;
        let is_json = text_of(&bytes, "standard input")?.trim_start().starts_with('{');
        if is_json {
            return workload::parse(&bytes, Path::new("standard input")).map_err(CliError::input);
        }
        return lines(&bytes, "standard input", "stdin");
    }
    if path.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("txt")) {
        return workload::read(path).map_err(CliError::input);
    }
    let bytes = fs::read(path).map_err(|error| CliError::input(format!("cannot read the prompts {shown}: {error}")))?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    lines(&bytes, &shown.to_string(), &name)
}

/// The prompts as the model's tokens, `chat` in its chat template; each generates `max_tokens` at most, or its own limit if
/// that is less.
pub fn tokenize(
    items: &[WorkloadItem],
    loaded: &LoadedModel,
    max_tokens: u32,
    chat: bool,
) -> Result<Vec<RecordPrompt>, CliError> {
    let tokenizer = loaded.tokenizer();
    let prompt = |item: &WorkloadItem| {
        let wrapped = chat.then(|| loaded.chat(&[("user", &item.prompt)])).transpose()?;
        let tokens = tokenizer
            .tokenize(wrapped.as_ref().unwrap_or(&item.prompt))
            .map_err(|error| CliError::input(format!("prompt \"{}\": {error}", shown(&item.id))))?;
        let max_tokens = item.max_tokens.map_or(max_tokens, |n| n.min(max_tokens));
        Ok(RecordPrompt { id: item.id.clone(), domain: item.domain.clone(), tokens, max_tokens })
    };
    items.iter().map(prompt).collect()
}

fn text_of<'a>(bytes: &'a [u8], shown: &str) -> Result<&'a str, CliError> {
    let text = str::from_utf8(bytes).map_err(|error| {
        let line = bytes[..error.valid_up_to()].split(|&byte| byte == b'\n').count();
        CliError::input(format!("{shown}, line {line}: not UTF-8; convert the prompts first"))
    })?;
    Ok(text.strip_prefix('\u{feff}').unwrap_or(text))
}

fn lines(bytes: &[u8], shown: &str, name: &str) -> Result<Vec<WorkloadItem>, CliError> {
    let item = |(line, prompt): (usize, &str)| WorkloadItem {
        id: format!("{name}:{line}"),
        domain: None,
        prompt: prompt.to_owned(),
        max_tokens: None,
    };
    let text = text_of(bytes, shown)?;
    let items: Vec<_> = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()).map(item).collect();
    if items.is_empty() {
        return Err(CliError::input(format!("{shown} has no prompts; it needs at least one line of text")));
    }
    Ok(items)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_text_is_a_prompt_named_by_its_place() {
        let items = lines(b"\xef\xbb\xbfone\r\n\n  two \n", "p.txt", "p").expect("two prompts");
        let got: Vec<_> = items.iter().map(|item| (item.id.as_str(), item.prompt.as_str())).collect();
        assert_eq!(got, [("p:1", "one"), ("p:3", "  two ")]);
        let error = lines(b" \n\n", "p.txt", "p").expect_err("no prompts").message;
        assert!(error.contains("p.txt has no prompts"), "{error}");
        let error = lines(b"a\n\xe9\n", "p.txt", "p").expect_err("Latin-1").message;
        assert!(error.contains("p.txt, line 2: not UTF-8"), "{error}");
    }
}
