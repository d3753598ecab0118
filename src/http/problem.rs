//! What a request is told that is neither run nor replayed, as a document of RFC 9457 or in Stripe's shape.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderValue, LINK, RETRY_AFTER};
use http::{Response, StatusCode};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use serde_json::json;

use super::media_type;
use crate::reservation::KeyState;

/// Where the docs of each problem are, once the crate's are published: the base of the `type` URIs.
const TYPES: &str = "https://docs.rs/keyonce/latest/keyonce/http/enum.Problem.html#variant.";

/// What is escaped in a message of gRPC.
const GRPC_MESSAGE: AsciiSet = CONTROLS.add(b'%');

/// What a client is told when its request is neither run nor replayed.
///
/// Each is a document of type `application/problem+json` (RFC 9457), whose `type` is the address of the variant in
/// these docs and never changes: `https://docs.rs/keyonce/latest/keyonce/http/enum.Problem.html#variant.` and the
/// variant's name. Beside `title`, `status` and `detail` it has the member `retryable`: whether the client should send
/// the same request again, unchanged. The same address stands in a `Link` header of the relation `describedby`, as the
/// IETF draft asks for. In Stripe's dialect it is `{"error": {"type": .., "code": .., "message": ..}}`. A gRPC client,
/// which says so by its content type, gets a gRPC status instead, with the same `Link` and `Retry-After` in its
/// metadata.
///
/// | problem | status | Stripe's dialect | gRPC | the client |
/// |---|---|---|---|---|
/// | [`KeyMissing`](Self::KeyMissing) | 400 | 400 | `INVALID_ARGUMENT` | adds a key |
/// | [`KeyInvalid`](Self::KeyInvalid) | 400 | 400 | `INVALID_ARGUMENT` | mends the header |
/// | [`BodyUnreadable`](Self::BodyUnreadable) | 400 | 400 | `INVALID_ARGUMENT` | sends it again |
/// | [`BodyTooLarge`](Self::BodyTooLarge) | 413 | 413 | `RESOURCE_EXHAUSTED` | sends less |
/// | [`ScopeUnknown`](Self::ScopeUnknown) | 403 | 403 | `PERMISSION_DENIED` | says who it is |
/// | [`Mismatch`](Self::Mismatch) | 422 | 400, `idempotency_error` | `FAILED_PRECONDITION` | makes a new key, or sends the request that the key stands for |
/// | [`TooOld`](Self::TooOld) | 412 | 412 | `FAILED_PRECONDITION` | finds out what became of it |
/// | [`InFlight`](Self::InFlight) | 409, `Retry-After` | 409, `idempotency_key_in_use` | `ABORTED` | sends it again later |
/// | [`Interrupted`](Self::Interrupted) | 409 | 409, `idempotency_outcome_unknown` | `ABORTED` | asks again later, or somebody |
/// | [`Superseded`](Self::Superseded) | 409, `Retry-After` | 409, `idempotency_key_in_use` | `ABORTED` | sends it again |
/// | [`ReplayRefused`](Self::ReplayRefused) | as the hook says | the same | `PERMISSION_DENIED` | has lost the right to see the answer |
/// | [`Unavailable`](Self::Unavailable) | 503, `Retry-After` | 503 | `UNAVAILABLE` | sends it again later |
/// | [`NotStored`](Self::NotStored) | 503, `Retry-After` | 503 | `UNAVAILABLE` | sends it again later |
/// | [`Unreadable`](Self::Unreadable) | 500 | 500 | `INTERNAL` | asks somebody |
/// | [`ResponseNotKept`](Self::ResponseNotKept) | the first answer's | the same | `ALREADY_EXISTS` | looks the answer up |
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// The request needs an `Idempotency-Key` and has none.
    KeyMissing,
    /// The header is no key: it is empty, longer than 255 characters, on several lines, not visible ASCII, or begins
    /// with a quote and is no RFC 8941 string.
    KeyInvalid {
        /// What is wrong with it.
        why: String,
    },
    /// The body of the request broke off.
    BodyUnreadable,
    /// The body of the request is larger than the service takes under a key.
    BodyTooLarge {
        /// The limit, in bytes.
        bytes_max: usize,
    },
    /// The service could not tell whose key this is, so it cannot keep it apart from those of others.
    ScopeUnknown,
    /// The key stands for another request: another method, path, query, content type or body. Told also while that
    /// request runs; its answer is not told.
    Mismatch {
        /// When the key was first used.
        first_seen: SystemTime,
        /// What has become of the request that it stands for.
        state: KeyState,
    },
    /// The key was made so long ago that it may have been forgotten, so the request must not run as if it were new.
    TooOld {
        /// How long keys are remembered.
        retention: Duration,
    },
    /// The first request of this key is running.
    InFlight {
        /// How long it counts as running without a sign of life.
        retry_after: Duration,
    },
    /// The first request of this key began and did not finish. Whether it took effect is unknown; the service, or an
    /// operator, has to find out. To send it again does no harm, it is told the same until then.
    Interrupted {
        /// Which attempt it was.
        attempt: u32,
        /// Since when nobody is known to work on it.
        since: SystemTime,
    },
    /// The request ran, and meanwhile its key was taken over or settled by somebody else, whose answer counts.
    Superseded,
    /// The answer is there, and may not be shown to this client any more.
    ReplayRefused {
        /// What the service's hook said.
        status: StatusCode,
    },
    /// The store of keys cannot answer, so the request was not run.
    Unavailable {
        /// When it is worth trying again.
        retry_after: Duration,
    },
    /// The request ran, and its answer could not be stored; so it is not told, since a retry would not be told the
    /// same.
    NotStored {
        /// When it is worth trying again.
        retry_after: Duration,
    },
    /// Something other than an answer of this service is stored under the key.
    Unreadable,
    /// The request was done before, with this status, and the body of its answer was not kept: it was too large, a
    /// stream, or not to be stored. The header lines of the first answer are here, but those that tell of its body.
    ResponseNotKept {
        /// The status of the first answer.
        status: StatusCode,
        /// What the service left to find the answer by, if it left anything.
        reference: String,
    },
}

/// How a problem is written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    Ietf,
    Stripe,
    Grpc,
}

impl Dialect {
    /// The dialect in which a request is answered: a gRPC client understands its own alone.
    pub(super) fn of(self, headers: &HeaderMap) -> Self {
        if media_type(headers).starts_with("application/grpc") { Self::Grpc } else { self }
    }
}

impl Problem {
    /// The status, as the IETF draft has it where it has a rule.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::KeyMissing | Self::KeyInvalid { .. } | Self::BodyUnreadable => StatusCode::BAD_REQUEST,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::ScopeUnknown => StatusCode::FORBIDDEN,
            Self::Mismatch { .. } => StatusCode::UNPROCESSABLE_ENTITY,
            Self::TooOld { .. } => StatusCode::PRECONDITION_FAILED,
            Self::InFlight { .. } | Self::Interrupted { .. } | Self::Superseded => StatusCode::CONFLICT,
            Self::Unavailable { .. } | Self::NotStored { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::Unreadable => StatusCode::INTERNAL_SERVER_ERROR,
            Self::ReplayRefused { status } | Self::ResponseNotKept { status, .. } => *status,
        }
    }

    /// The `type` URI.
    pub fn type_uri(&self) -> String {
        format!("{TYPES}{}", self.name())
    }

    /// Whether the client should send the same request again, unchanged.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::BodyUnreadable
            | Self::InFlight { .. }
            | Self::Interrupted { .. }
            | Self::Superseded
            | Self::Unavailable { .. }
            | Self::NotStored { .. } => true,
            Self::KeyMissing
            | Self::KeyInvalid { .. }
            | Self::BodyTooLarge { .. }
            | Self::ScopeUnknown
            | Self::Mismatch { .. }
            | Self::TooOld { .. }
            | Self::ReplayRefused { .. }
            | Self::Unreadable
            | Self::ResponseNotKept { .. } => false,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::KeyMissing => "KeyMissing",
            Self::KeyInvalid { .. } => "KeyInvalid",
            Self::BodyUnreadable => "BodyUnreadable",
            Self::BodyTooLarge { .. } => "BodyTooLarge",
            Self::ScopeUnknown => "ScopeUnknown",
            Self::Mismatch { .. } => "Mismatch",
            Self::TooOld { .. } => "TooOld",
            Self::InFlight { .. } => "InFlight",
            Self::Interrupted { .. } => "Interrupted",
            Self::Superseded => "Superseded",
            Self::ReplayRefused { .. } => "ReplayRefused",
            Self::Unavailable { .. } => "Unavailable",
            Self::NotStored { .. } => "NotStored",
            Self::Unreadable => "Unreadable",
            Self::ResponseNotKept { .. } => "ResponseNotKept",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::KeyMissing => "Idempotency-Key is missing",
            Self::KeyInvalid { .. } => "Idempotency-Key is not valid",
            Self::BodyUnreadable => "The request body broke off",
            Self::BodyTooLarge { .. } => "The request body is too large",
            Self::ScopeUnknown => "Whose Idempotency-Key this is cannot be told",
            Self::Mismatch { .. } => "Idempotency-Key is already used",
            Self::TooOld { .. } => "Idempotency-Key is too old",
            Self::InFlight { .. } => "A request is outstanding for this Idempotency-Key",
            Self::Interrupted { .. } => "The outcome of an earlier request is unknown",
            Self::Superseded => "Another attempt's answer counts",
            Self::ReplayRefused { .. } => "The answer may not be shown",
            Self::Unavailable { .. } => "The store of idempotency keys cannot answer",
            Self::NotStored { .. } => "The answer could not be stored",
            Self::Unreadable => "What is stored is not an answer",
            Self::ResponseNotKept { .. } => "Done before, the response body was not kept",
        }
    }

    fn detail(&self) -> String {
        match self {
            Self::KeyMissing => {
                "This operation needs an Idempotency-Key header: one key per operation, the same key on \
                                 every try."
                    .to_owned()
            }
            Self::KeyInvalid { why } => {
                format!("The header must be one key of 1 to 255 visible ASCII characters, quoted or bare; {why}.")
            }
            Self::BodyUnreadable => "Nothing was done. Send the same request again.".to_owned(),
            Self::BodyTooLarge { bytes_max } => format!("At most {bytes_max} bytes are taken. Nothing was done."),
            Self::ScopeUnknown => "Keys are kept apart by who sends them. Nothing was done.".to_owned(),
            Self::Mismatch { first_seen, state } => format!(
                "The key was first used at {} for a different request, which {}. Use a new key for a new request.",
                httpdate::fmt_http_date(*first_seen),
                match state {
                    KeyState::InFlight => "is being processed",
                    KeyState::Interrupted => "did not finish",
                    KeyState::Done => "is done",
                }
            ),
            Self::TooOld { retention } => format!(
                "Keys are remembered for {} seconds, and this request was first sent earlier. It may have been done, \
                 and was not run again.",
                retention.as_secs()
            ),
            Self::InFlight { .. } => {
                "A request with the same Idempotency-Key is being processed. Send the same request again later."
                    .to_owned()
            }
            Self::Interrupted { attempt, since } => format!(
                "Attempt {attempt} began and did not finish (known since {}); whether it took effect is being found out. \
                 It was not run again.",
                httpdate::fmt_http_date(*since)
            ),
            Self::Superseded => "The key was taken over or settled meanwhile. Send the same request again.".to_owned(),
            Self::ReplayRefused { .. } => "The request was done before, and was not run again.".to_owned(),
            Self::Unavailable { .. } => "The request was not run. Send the same request again later.".to_owned(),
            Self::NotStored { .. } => {
                "The request may have taken effect. Send the same request again later: it will not be run twice \
                 unknowingly."
                    .to_owned()
            }
            Self::Unreadable => "The request was not run again.".to_owned(),
            Self::ResponseNotKept { status, reference } => {
                let found = if reference.is_empty() { String::new() } else { format!(" Its reference: {reference}") };
                format!("The request was answered with {} before, and was not run again.{found}", status.as_u16())
            }
        }
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::InFlight { retry_after } | Self::Unavailable { retry_after } | Self::NotStored { retry_after } => {
                Some(*retry_after)
            }
            Self::Superseded => Some(Duration::ZERO),
            _ => None,
        }
    }

    /// The answer that tells of the problem.
    pub(super) fn into_response(self, dialect: Dialect) -> (Response<()>, Bytes) {
        let mut response = Response::new(());
        *response.status_mut() = match (dialect, &self) {
            (Dialect::Stripe, Self::Mismatch { .. }) => StatusCode::BAD_REQUEST,
            (Dialect::Ietf | Dialect::Stripe, _) => self.status(),
            (Dialect::Grpc, _) => StatusCode::OK,
        };
        let headers = response.headers_mut();
        let (document, content_type) = match dialect {
            Dialect::Ietf => (self.document().to_string(), "application/problem+json"),
            Dialect::Stripe => (self.stripe_error().to_string(), "application/json"),
            Dialect::Grpc => {
                headers.insert("grpc-status", HeaderValue::from(self.grpc_code()));
                let message = utf8_percent_encode(&self.detail(), &GRPC_MESSAGE).to_string();
                if let Ok(message) = HeaderValue::from_str(&message) {
                    headers.insert("grpc-message", message);
                }
                (String::new(), "application/grpc")
            }
        };
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Ok(link) = HeaderValue::from_str(&format!("<{}>; rel=\"describedby\"", self.type_uri())) {
            headers.insert(LINK, link);
        }
        if let Some(retry_after) = self.retry_after() {
            headers.insert(RETRY_AFTER, HeaderValue::from(whole_seconds(retry_after)));
        }
        (response, Bytes::from(document))
    }

    /// The status code of gRPC, as its specification numbers them.
    fn grpc_code(&self) -> u16 {
        match self {
            Self::KeyMissing | Self::KeyInvalid { .. } | Self::BodyUnreadable => 3,
            Self::ResponseNotKept { .. } => 6,
            Self::ScopeUnknown | Self::ReplayRefused { .. } => 7,
            Self::BodyTooLarge { .. } => 8,
            Self::Mismatch { .. } | Self::TooOld { .. } => 9,
            Self::InFlight { .. } | Self::Interrupted { .. } | Self::Superseded => 10,
            Self::Unreadable => 13,
            Self::Unavailable { .. } | Self::NotStored { .. } => 14,
        }
    }

    fn document(&self) -> serde_json::Value {
        let mut document = json!({
            "type": self.type_uri(),
            "title": self.title(),
            "status": self.status().as_u16(),
            "detail": self.detail(),
            "retryable": self.is_retryable(),
        });
        if let (Self::ResponseNotKept { reference, .. }, Some(members)) = (self, document.as_object_mut())
            && !reference.is_empty()
        {
            members.insert("reference".to_owned(), json!(reference));
        }
        document
    }

    fn stripe_error(&self) -> serde_json::Value {
        let (kind, code) = match self {
            Self::Mismatch { .. } => ("idempotency_error", None),
            Self::InFlight { .. } | Self::Superseded => ("idempotency_error", Some("idempotency_key_in_use")),
            Self::Interrupted { .. } => ("idempotency_error", Some("idempotency_outcome_unknown")),
            Self::TooOld { .. } => ("idempotency_error", Some("idempotency_key_too_old")),
            Self::Unavailable { .. } | Self::NotStored { .. } | Self::Unreadable => ("api_error", None),
            Self::KeyMissing
            | Self::KeyInvalid { .. }
            | Self::BodyUnreadable
            | Self::BodyTooLarge { .. }
            | Self::ScopeUnknown
            | Self::ReplayRefused { .. }
            | Self::ResponseNotKept { .. } => ("invalid_request_error", None),
        };
        let mut error = json!({ "type": kind, "message": self.detail(), "doc_url": self.type_uri() });
        if let (Some(code), Some(members)) = (code, error.as_object_mut()) {
            members.insert("code".to_owned(), json!(code));
        }
        json!({ "error": error })
    }
}

/// The whole seconds of a `Retry-After` header: at least 1, rounded up, so that who comes back then is not too early.
fn whole_seconds(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retry_is_never_asked_for_too_early_or_at_once() {
        let seconds = [(0, 1), (1, 1), (999, 1), (1000, 1), (1001, 2), (30_000, 30)];
        for (ms, seconds) in seconds {
            assert_eq!(whole_seconds(Duration::from_millis(ms)), seconds, "{ms} ms");
        }
    }

    #[test]
    fn a_problem_is_a_document_with_a_stable_type_that_the_docs_explain() {
        let problem = Problem::InFlight { retry_after: Duration::from_millis(1500) };
        let (response, body) = problem.into_response(Dialect::Ietf);
        assert_eq!(response.status(), StatusCode::CONFLICT);
        assert_eq!(response.headers()[RETRY_AFTER], "2");
        let document: serde_json::Value = serde_json::from_slice(&body).unwrap();
        let uri = "https://docs.rs/keyonce/latest/keyonce/http/enum.Problem.html#variant.InFlight";
        assert_eq!(document["type"], uri);
        assert_eq!(document["status"], 409);
        assert_eq!(document["retryable"], true);
        assert_eq!(response.headers()[LINK], format!("<{uri}>; rel=\"describedby\""));
    }
}
