use serde_json::{Value, json};

use super::{harmony::Harmony, reasoning::Reasoning, tools::ToolParser};

/// A part of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Delta {
    Content(String),
    Reasoning(String),
    Call(Call),
}

/// A function the model wants called.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Call {
    /// The name that its result is given back under; different for every call.
    pub id: String,
    /// Its place among the calls of the answer.
    pub index: usize,
    pub name: String,
    /// A JSON text, as OpenAI has it.
    pub arguments: String,
}

impl Call {
    /// A call that its answer will number.
    pub fn new(name: impl Into<String>, arguments: String) -> Self {
        Self { id: String::new(), index: 0, name: name.into(), arguments }
    }

    /// In OpenAI's words; parts of a stream carry their index.
    pub fn to_json(&self, index: Option<usize>) -> Value {
        let mut call = json!({
            "id": self.id, "type": "function",
            "function": { "name": self.name, "arguments": self.arguments },
        });
        if let Some(index) = index {
            call["index"] = index.into();
        }
        call
    }
}

/// Reads the text of one choice as what it stands for.
#[derive(Debug)]
pub(super) struct Output {
    reader: Reader,
    n_calls: usize,
    max_calls: usize,
    /// What sets its calls' names apart from those of others.
    name: String,
    /// The first choice of its prompt.
    pub opens_prompt: bool,
}

#[derive(Debug)]
enum Reader {
    Plain,
    Tagged { reasoning: Option<Reasoning>, tools: Option<ToolParser> },
    Harmony(Harmony),
}

impl Output {
    /// All of it is text.
    pub fn plain(opens_prompt: bool) -> Self {
        Self::new(Reader::Plain, opens_prompt)
    }

    /// Reasoning and calls stand between tags.
    pub fn tagged(reasoning: Option<Reasoning>, tools: Option<ToolParser>, opens_prompt: bool) -> Self {
        Self::new(Reader::Tagged { reasoning, tools }, opens_prompt)
    }

    /// Channels, as gpt-oss writes them.
    pub fn harmony(opens_prompt: bool) -> Self {
        Self::new(Reader::Harmony(Harmony::new()), opens_prompt)
    }

    fn new(reader: Reader, opens_prompt: bool) -> Self {
        Self { reader, n_calls: 0, max_calls: usize::MAX, name: String::new(), opens_prompt }
    }

    /// Calls its calls after choice `index` of the answer `id`.
    #[must_use]
    pub fn of(mut self, id: &str, index: usize) -> Self {
        self.name = format!("{}{index}", id.rsplit('-').next().unwrap_or(id));
        self
    }

    /// Gives so many calls at most; those behind them are left out.
    #[must_use]
    pub fn of_calls(mut self, max_calls: usize) -> Self {
        self.max_calls = max_calls;
        self
    }

    /// What more text says, in order.
    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        let deltas = match &mut self.reader {
            Reader::Plain => vec![Delta::Content(text.to_owned())],
            Reader::Tagged { reasoning, tools } => {
                let parts = match reasoning {
                    Some(reasoning) => reasoning.push(text),
                    None => vec![Delta::Content(text.to_owned())],
                };
                call_tools(parts, tools.as_mut())
            }
            Reader::Harmony(harmony) => harmony.push(text),
        };
        self.number(deltas)
    }

    /// The text ended: what was held back, now that nothing can follow.
    pub fn finish(&mut self) -> Vec<Delta> {
        let deltas = match &mut self.reader {
            Reader::Plain => Vec::new(),
            Reader::Tagged { reasoning, tools } => {
                let parts = reasoning.as_mut().map(Reasoning::finish).unwrap_or_default();
                let mut deltas = call_tools(parts, tools.as_mut());
                deltas.extend(tools.iter_mut().flat_map(ToolParser::finish));
                deltas
            }
            Reader::Harmony(harmony) => harmony.finish(),
        };
        self.number(deltas)
    }

    /// Whether the model called a function.
    pub fn has_calls(&self) -> bool {
        self.n_calls > 0
    }

    fn number(&mut self, mut deltas: Vec<Delta>) -> Vec<Delta> {
        deltas.retain(|delta| !matches!(delta, Delta::Content(text) | Delta::Reasoning(text) if text.is_empty()));
        deltas.retain_mut(|delta| {
            let Delta::Call(call) = delta else { return true };
            let is_wanted = self.n_calls < self.max_calls;
            if is_wanted {
                call.index = self.n_calls;
                call.id = format!("call_{}_{}", self.name, self.n_calls);
                self.n_calls += 1;
            }
            is_wanted
        });
        deltas
    }
}

fn call_tools(parts: Vec<Delta>, tools: Option<&mut ToolParser>) -> Vec<Delta> {
    let Some(tools) = tools else { return parts };
    let mut deltas = Vec::new();
    for part in parts {
        match part {
            Delta::Content(text) => deltas.extend(tools.push(&text)),
            other => deltas.push(other),
        }
    }
    deltas
}

#[cfg(test)]
mod tests {
    use super::{super::tools::CallFormat, *};

    // Symptom: a client that asked for one call at most (`parallel_tool_calls: false`) got all that the model wrote.
    #[test]
    fn calls_beyond_those_asked_for_are_left_out() {
        let text = "<tool_call>{\"name\": \"f\"}</tool_call> <tool_call>{\"name\": \"g\"}</tool_call>";
        let names = |most: usize| {
            let mut output = Output::tagged(None, Some(ToolParser::new(CallFormat::Tagged)), true).of_calls(most);
            let mut deltas = output.push(text);
            deltas.extend(output.finish());
            assert!(output.has_calls());
            let calls = deltas.into_iter().map(|delta| match delta {
                Delta::Call(call) => (call.index, call.name),
                other => panic!("{other:?} is no call"),
            });
            calls.collect::<Vec<_>>()
        };
        let (f, g) = ((0, "f".to_owned()), (1, "g".to_owned()));
        assert_eq!((names(usize::MAX), names(1)), (vec![f.clone(), g], vec![f]));
    }
}
