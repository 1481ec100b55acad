use std::{collections::BTreeMap, sync::Arc};

use axum::{
    extract::{Request, State},
    response::Response,
};
use minijinja::Value as Jinja;
use serde_json::Value;

use super::{
    app::{App, blocking, now},
    ask::{Ask, MAX_LOGPROBS, n_probs},
    body,
    completions::log_text,
    error::ApiError,
    fields::Fields,
    messages,
    output::Output,
    reasoning::Reasoning,
    respond::Answer,
    shape::{Kind, Shape},
    special::Part,
    template::to_jinja,
    tools::{CallFormat, ToolParser},
};

/// `POST /v1/chat/completions`.
pub(super) async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let bytes = body::read(request).await?;
    let worker = Arc::clone(&app);
    let chat = blocking(move || Chat::read(&worker, &bytes)).await??;
    let tokens = app.tokenize_parts(chat.parts.clone(), "messages").await?;
    app.check_grammar(&chat.ask.sampling).await?;
    let id = format!("chatcmpl-{:016x}", app.fresh());
    let shape = Shape { kind: Kind::Chat, id, created: now(), model: app.card.id.clone() };
    let mut choices = app.submit(&shape.id, &[tokens], &chat.ask, "messages")?;
    log_text(&app, &mut choices, chat.messages.as_ref());
    let outputs =
        (0..choices.len()).map(|index| chat.output(app.template.source(), index == 0).of(&shape.id, index)).collect();
    let answer = Answer::new(&app, shape, choices, outputs, &chat.ask);
    if chat.ask.stream { Ok(answer.stream(chat.ask.include_usage)) } else { answer.whole().await }
}

/// A chat request, understood.
struct Chat {
    ask: Ask,
    parts: Vec<Part>,
    /// For the request log.
    messages: Option<Value>,
    calls: Option<CallFormat>,
    /// Calls of an answer at most.
    max_calls: usize,
    splits_reasoning: bool,
}

impl Chat {
    fn read(app: &App, bytes: &[u8]) -> Result<Self, ApiError> {
        let body = body::parse(bytes)?;
        let fields = Fields::of(&body, "")?;
        let mut ask = Ask::read(&fields, app.fresh(), app.engine.policy_name(), app.config.max_choices)?;
        ask.sampling.n_logprobs = logprobs(&fields)?;
        let mark = app.specials.mark(&body)?;
        let plain = |text: &str| mark.map_or_else(|| text.to_owned(), |mark| app.specials.marked(text, mark));
        let messages = messages::read(&fields, &plain)?;
        let tools = messages::tools(&fields)?;
        let choice = messages::tool_choice(&fields, !tools.is_empty())?;
        let format = CallFormat::of_template(app.template.source());
        if let Some(grammar) = messages::forced_call(tools, &choice, format)? {
            if ask.sampling.grammar.is_some() {
                return Err(ApiError::invalid(
                    "tool_choice",
                    "tool_choice and a grammar both say what the text must be",
                ));
            }
            ask.sampling.grammar = Some(grammar.into());
        }
        let offered = Some(tools).filter(|tools| !tools.is_empty() && choice.offers());
        let reads_calls = fields.flag("parse_tool_calls")?.unwrap_or(true);
        let calls = offered.filter(|_| reads_calls).map(|_| format);
        let max_calls = if fields.flag("parallel_tool_calls")?.unwrap_or(true) { usize::MAX } else { 1 };
        let tools = offered.map(|tools| Jinja::from(tools.iter().map(to_jinja).collect::<Vec<_>>()));
        let splits_reasoning = match fields.text("reasoning_format")? {
            None | Some("auto" | "deepseek") => true,
            Some("none") => false,
            Some(other) => {
                let why = format!("reasoning_format is {other}; it must be auto, deepseek or none");
                return Err(ApiError::invalid("reasoning_format", why));
            }
        };
        let extra = extra(&fields)?;
        let parts = app.specials.parts(&app.template.render(messages, tools, extra)?, mark)?;
        let messages = app.config.log_text.then(|| fields.get("messages").cloned().unwrap_or_default());
        Ok(Self { ask, parts, messages, calls, max_calls, splits_reasoning })
    }

    /// How the text of a choice is to be read.
    fn output(&self, template: &str, opens_prompt: bool) -> Output {
        self.reader(template, opens_prompt).of_calls(self.max_calls)
    }

    fn reader(&self, template: &str, opens_prompt: bool) -> Output {
        if self.ask.sampling.grammar.is_some() {
            // A grammar leaves no room for thinking or channels, only for the call it may be of.
            return Output::tagged(None, self.calls.map(ToolParser::new), opens_prompt);
        }
        if template.contains("<|channel|>") && (self.splits_reasoning || self.calls.is_some()) {
            return Output::harmony(opens_prompt);
        }
        let thinks = self.splits_reasoning && template.contains("</think>");
        // The template's own words end the prompt.
        let end = self.parts.last().map_or("", |part| &part.text);
        let reasoning = thinks.then(|| Reasoning::new(end));
        Output::tagged(reasoning, self.calls.map(ToolParser::new), opens_prompt)
    }
}

fn logprobs(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let wanted = fields.flag("logprobs")?.unwrap_or(false);
    let top = fields.whole("top_logprobs", 0..=MAX_LOGPROBS)?;
    if top.is_some_and(|top| top > 0) && !wanted {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs is only for requests with logprobs: true"));
    }
    if wanted { Ok(Some(top.unwrap_or(0) as u32)) } else { n_probs(fields) }
}

/// More names for the template: `chat_template_kwargs`, as llama-server has them.
fn extra(fields: &Fields<'_>) -> Result<BTreeMap<String, Jinja>, ApiError> {
    let mut extra = BTreeMap::new();
    if let Some(given) = fields.object("chat_template_kwargs")? {
        for (name, value) in given.iter() {
            extra.insert(name.clone(), to_jinja(value));
        }
    }
    if let Some(effort) = fields.text("reasoning_effort")? {
        extra.insert("reasoning_effort".to_owned(), Jinja::from(effort));
    }
    Ok(extra)
}
