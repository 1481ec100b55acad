use super::output::Delta;
use crate::engine::StopFilter;

const OPEN: &str = "<think>";
/// The line breaks in front of the tag are not part of the thinking.
const CLOSE: [&str; 3] = ["</think>", "\n</think>", "\n\n</think>"];

/// Parts an answer from the thinking in front of it, which stands between `<think>` and `</think>`.
#[derive(Debug)]
pub(super) struct Reasoning {
    state: State,
}

#[derive(Debug)]
enum State {
    /// Nothing but white space and perhaps the beginning of a tag so far.
    Start(String),
    Thinking {
        close: StopFilter,
        /// The line break after the tag is not part of it.
        is_first: bool,
    },
    /// The thinking is over; the white space after it is not part of the answer.
    Gap,
    Answer,
}

impl Reasoning {
    /// For an answer to `prompt`, which may have opened the thinking already.
    pub fn new(prompt: &str) -> Self {
        let state = if prompt.trim_end().ends_with(OPEN) { State::thinking() } else { State::Start(String::new()) };
        Self { state }
    }

    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        let mut deltas = Vec::new();
        let mut text = text.to_owned();
        while !text.is_empty() {
            text = self.step(&text, &mut deltas);
        }
        deltas
    }

    pub fn finish(&mut self) -> Vec<Delta> {
        match &mut self.state {
            State::Start(held) => vec![Delta::Content(std::mem::take(held))],
            State::Thinking { close, .. } => vec![Delta::Reasoning(close.finish())],
            State::Gap | State::Answer => Vec::new(),
        }
    }

    /// Takes text as far as the state reaches; gives the rest.
    fn step(&mut self, text: &str, deltas: &mut Vec<Delta>) -> String {
        match &mut self.state {
            State::Start(held) => {
                held.push_str(text);
                let seen = held.trim_start();
                if let Some(rest) = seen.strip_prefix(OPEN) {
                    let rest = rest.to_owned();
                    self.state = State::thinking();
                    return rest;
                }
                if !OPEN.starts_with(seen) {
                    deltas.push(Delta::Content(std::mem::take(held)));
                    self.state = State::Answer;
                }
                String::new()
            }
            State::Thinking { close, is_first } => {
                let text = if *is_first { text.trim_start_matches('\n') } else { text };
                *is_first &= text.is_empty();
                let released = close.push(text);
                let over = released.hit.is_some();
                deltas.push(Delta::Reasoning(released.text));
                if !over {
                    return String::new();
                }
                let rest = close.finish();
                self.state = State::Gap;
                rest
            }
            State::Gap => {
                let rest = text.trim_start();
                if !rest.is_empty() {
                    self.state = State::Answer;
                }
                rest.to_owned()
            }
            State::Answer => {
                deltas.push(Delta::Content(text.to_owned()));
                String::new()
            }
        }
    }
}

impl State {
    fn thinking() -> Self {
        Self::Thinking { close: StopFilter::new(CLOSE.map(str::to_owned).to_vec()), is_first: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reasoning and answer, with the text cut into pieces of `n` characters.
    fn read(prompt: &str, text: &str, n: usize) -> (String, String) {
        let mut reasoning = Reasoning::new(prompt);
        let chars: Vec<char> = text.chars().collect();
        let mut deltas: Vec<Delta> =
            chars.chunks(n).flat_map(|piece| reasoning.push(&piece.iter().collect::<String>())).collect();
        deltas.extend(reasoning.finish());
        let mut parts = (String::new(), String::new());
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => parts.0.push_str(&text),
                Delta::Content(text) => parts.1.push_str(&text),
                Delta::Call(call) => panic!("{call:?}"),
            }
        }
        parts
    }

    #[test]
    fn thinking_is_parted_from_the_answer_however_it_is_cut() {
        for n in 1..40 {
            for (prompt, text, thought, answer) in [
                ("", "<think>\nwell <b>\n</think>\n\nYes.", "well <b>", "Yes."),
                ("", "\n<think></think>Yes </think>", "", "Yes </think>"),
                ("assistant\n<think>\n", "hm</think>Yes", "hm", "Yes"),
                ("", "<thin ice", "", "<thin ice"),
                ("", "Yes <think>no", "", "Yes <think>no"),
                ("", "<think>endless", "endless", ""),
                ("", "<thi", "", "<thi"),
            ] {
                let (got, rest) = read(prompt, text, n);
                assert_eq!((got.as_str(), rest.as_str()), (thought, answer), "{text:?} in pieces of {n}");
            }
        }
    }
}
