use serde::de::IgnoredAny;

use super::output::{Call, Delta};
use crate::engine::StopFilter;

/// Marks of the format, by their place in this list.
const MARKS: [&str; 6] = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"];
const MESSAGE: usize = 2;

/// Reads gpt-oss's channels: `analysis` is reasoning, `final` is the answer, `commentary to=functions.NAME` a call.
#[derive(Debug)]
pub(super) struct Harmony {
    marks: StopFilter,
    state: State,
    /// Whether the text has any mark; one without is the answer as it is.
    is_marked: bool,
}

#[derive(Debug)]
enum State {
    /// Between a mark and `<|message|>`: who speaks, and on which channel.
    Header(String),
    Reasoning,
    Content,
    Call {
        name: String,
        arguments: String,
    },
}

impl Harmony {
    pub fn new() -> Self {
        Self { marks: marks(), state: State::Header(String::new()), is_marked: false }
    }

    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        let mut deltas = Vec::new();
        let mut text = text.to_owned();
        loop {
            let released = self.marks.push(&text);
            self.take(released.text, &mut deltas);
            let Some(mark) = released.hit else { return deltas };
            self.is_marked = true;
            text = self.marks.finish();
            deltas.extend(self.pass(mark));
        }
    }

    pub fn finish(&mut self) -> Vec<Delta> {
        let mut deltas = Vec::new();
        let rest = self.marks.finish();
        self.take(rest, &mut deltas);
        deltas.extend(match self.leave() {
            // Cut before its arguments were whole, it is only text.
            Some(Delta::Call(call)) if serde_json::from_str::<IgnoredAny>(&call.arguments).is_err() => {
                Some(Delta::Content(call.arguments))
            }
            other => other,
        });
        deltas
    }

    fn take(&mut self, text: String, deltas: &mut Vec<Delta>) {
        match &mut self.state {
            State::Header(header) => header.push_str(&text),
            State::Reasoning => deltas.push(Delta::Reasoning(text)),
            State::Content => deltas.push(Delta::Content(text)),
            State::Call { arguments, .. } => arguments.push_str(&text),
        }
    }

    fn pass(&mut self, mark: usize) -> Option<Delta> {
        if mark == MESSAGE {
            if let State::Header(header) = &self.state {
                self.state = body_of(header);
            }
            return None;
        }
        // A header goes on over `<|channel|>`, which says the same word again where it does not.
        if let State::Header(header) = &mut self.state {
            header.push(' ');
            return None;
        }
        self.leave()
    }

    fn leave(&mut self) -> Option<Delta> {
        match std::mem::replace(&mut self.state, State::Header(String::new())) {
            State::Call { name, arguments } => Some(Delta::Call(Call::new(name, arguments))),
            State::Header(text) if !self.is_marked => Some(Delta::Content(text)),
            _ => None,
        }
    }
}

fn marks() -> StopFilter {
    StopFilter::new(MARKS.iter().map(|&mark| mark.to_owned()).collect())
}

fn body_of(header: &str) -> State {
    let to = header.split_once("to=functions.").map(|(_, name)| name);
    let name = to.and_then(|name| name.split(|c: char| c.is_whitespace() || c == '<').next());
    match name {
        Some(name) => State::Call { name: name.to_owned(), arguments: String::new() },
        None if header.contains("analysis") => State::Reasoning,
        None => State::Content,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, n: usize) -> (String, String, Vec<(String, String)>) {
        let mut harmony = Harmony::new();
        let chars: Vec<char> = text.chars().collect();
        let mut deltas: Vec<Delta> =
            chars.chunks(n).flat_map(|piece| harmony.push(&piece.iter().collect::<String>())).collect();
        deltas.extend(harmony.finish());
        let mut read = (String::new(), String::new(), Vec::new());
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => read.0.push_str(&text),
                Delta::Content(text) => read.1.push_str(&text),
                Delta::Call(call) => read.2.push((call.name, call.arguments)),
            }
        }
        read
    }

    #[test]
    fn channels_are_told_apart_however_the_text_is_cut() {
        for n in 1..50 {
            let text =
                "<|channel|>analysis<|message|>Hm, 2 < 3.<|end|><|start|>assistant<|channel|>final<|message|>Yes.";
            assert_eq!(read(text, n), ("Hm, 2 < 3.".to_owned(), "Yes.".to_owned(), vec![]), "{n}");
            let text =
                "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\":\"Oslo\"}<|call|>";
            assert_eq!(read("no marks", n), (String::new(), "no marks".to_owned(), vec![]), "{n}");
            let calls = vec![("weather".to_owned(), "{\"city\":\"Oslo\"}".to_owned())];
            assert_eq!(read(text, n), (String::new(), String::new(), calls), "{n}");
        }
    }

    // Symptom: a call cut at `max_tokens` came back as a call with half of its arguments.
    #[test]
    fn a_cut_call_is_a_call_only_with_all_its_arguments() {
        let head = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>";
        let call = |arguments: &str| (String::new(), String::new(), vec![("f".to_owned(), arguments.to_owned())]);
        for n in 1..9 {
            let half = (String::new(), "{\"a\": 1".to_owned(), vec![]);
            assert_eq!(read(&format!("{head}{{\"a\": 1"), n), half, "{n}");
            assert_eq!(read(&format!("{head}{{\"a\": 1}}"), n), call("{\"a\": 1}"), "{n}");
        }
    }
}
