//! What becomes of an answer, which of its header lines are stored, and what becomes of a key whose outcome is unknown.

use std::collections::BTreeSet;

use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_ENCODING, CONTENT_TYPE, COOKIE, DATE, HeaderMap, HeaderName, HeaderValue,
    PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, SET_COOKIE, TE, TRANSFER_ENCODING, UPGRADE, WWW_AUTHENTICATE,
};
use http::{StatusCode, response};

use super::Answer;

/// What an answer of the inner service means for the key.
///
/// The layer judges by the head of the answer; a handler that knows better puts a verdict into its response's
/// extensions:
///
/// ```
/// use keyonce::http::Verdict;
///
/// let mut response = http::Response::new("declined before anything happened");
/// *response.status_mut() = http::StatusCode::PAYMENT_REQUIRED;
/// response.extensions_mut().insert(Verdict::Release);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// It is final: stored, and replayed to every retry.
    Keep,
    /// It is final, and its body is not stored: a retry is told so, with the status and the [`Reference`].
    KeepWithoutBody,
    /// Nothing happened: the key is given back, and a retry runs.
    Release,
    /// Whether anything happened is unknown: a retry is told so.
    Interrupt,
}

impl Verdict {
    /// The default: [`by_status`](Self::by_status); and of gRPC, whose HTTP status is always 200, `PERMISSION_DENIED`,
    /// `RESOURCE_EXHAUSTED` and `UNAUTHENTICATED` release, where the answer has no message.
    pub fn by_head(head: &response::Parts) -> Self {
        match head.headers.get("grpc-status").map(HeaderValue::as_bytes) {
            Some(b"7" | b"8" | b"16") => Self::Release,
            _ => Self::by_status(head.status),
        }
    }

    /// 401, 403, 408, 413, 415, 422 and 429 release, since they are said before the work begins; every other answer is
    /// kept, 5xx as well, since the work may have had its effect. A protocol switch has no body to keep.
    pub fn by_status(status: StatusCode) -> Self {
        match status.as_u16() {
            401 | 403 | 408 | 413 | 415 | 422 | 429 => Self::Release,
            100..=199 => Self::KeepWithoutBody,
            _ => Self::Keep,
        }
    }

    /// Stripe's rule: once the work has begun its first status and body are final, whatever they are. 401 and 429 are
    /// said before it begins.
    pub fn by_status_as_stripe(status: StatusCode) -> Self {
        match status.as_u16() {
            401 | 429 => Self::Release,
            100..=199 => Self::KeepWithoutBody,
            _ => Self::Keep,
        }
    }
}

/// Where the answer can be found, should its body not be kept: a handler puts it into its response's extensions, and a
/// retry is told it.
///
/// ```
/// let mut response = http::Response::new("a long report");
/// response.extensions_mut().insert(keyonce::http::Reference("/reports/17".to_owned()));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference(
    /// As it is told: an address, most likely.
    pub String,
);

/// Which header lines of an answer are stored and replayed; of its trailers, too.
///
/// Those of one connection never are: `Connection` and what it names, `Keep-Alive`, `Proxy-Connection`, `TE`,
/// `Transfer-Encoding`, `Upgrade`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredHeaders {
    listed: BTreeSet<String>,
    allow: bool,
}

impl StoredHeaders {
    /// All but cookies, credentials and the date, which are of one answer and not of the work. The default.
    pub fn new() -> Self {
        Self::all_but([
            SET_COOKIE,
            HeaderName::from_static("set-cookie2"),
            COOKIE,
            AUTHORIZATION,
            WWW_AUTHENTICATE,
            PROXY_AUTHORIZATION,
            PROXY_AUTHENTICATE,
            HeaderName::from_static("authentication-info"),
            HeaderName::from_static("proxy-authentication-info"),
            DATE,
        ])
    }

    /// All but these. It replaces the default list.
    pub fn all_but(names: impl IntoIterator<Item = HeaderName>) -> Self {
        Self { listed: names.into_iter().map(|name| name.as_str().to_owned()).collect(), allow: false }
    }

    /// These alone, and what clients cannot read the body without: `Content-Type`, `Content-Encoding`, of gRPC the
    /// trailer `grpc-status`.
    pub fn only(names: impl IntoIterator<Item = HeaderName>) -> Self {
        let of_body = [CONTENT_TYPE, CONTENT_ENCODING, HeaderName::from_static("grpc-status")];
        Self { allow: true, ..Self::all_but(names.into_iter().chain(of_body)) }
    }

    /// One more that is not stored.
    pub fn deny(mut self, name: &HeaderName) -> Self {
        if self.allow {
            self.listed.remove(name.as_str());
        } else {
            self.listed.insert(name.as_str().to_owned());
        }
        self
    }

    /// One more that is stored.
    pub fn allow(mut self, name: &HeaderName) -> Self {
        if self.allow {
            self.listed.insert(name.as_str().to_owned());
        } else {
            self.listed.remove(name.as_str());
        }
        self
    }

    /// The lines that are stored, in order.
    pub(super) fn of(&self, headers: &HeaderMap) -> HeaderMap {
        let named = headers.get_all(CONNECTION).iter().filter_map(|line| line.to_str().ok());
        let named: Vec<_> =
            named.flat_map(|line| line.split(',').map(|name| name.trim().to_ascii_lowercase())).collect();
        let mut stored = HeaderMap::new();
        for (name, value) in headers {
            let of_connection = is_of_connection(name) || named.iter().any(|named| named == name.as_str());
            if !of_connection && self.listed.contains(name.as_str()) == self.allow {
                stored.append(name.clone(), value.clone());
            }
        }
        stored
    }
}

impl Default for StoredHeaders {
    fn default() -> Self {
        Self::new()
    }
}

/// The header fields that RFC 9110, section 7.6.1, ties to one connection.
fn is_of_connection(name: &HeaderName) -> bool {
    [CONNECTION, TE, TRANSFER_ENCODING, UPGRADE].contains(name)
        || ["keep-alive", "proxy-connection"].contains(&name.as_str())
}

/// What a reconciler found out about a request that began and did not finish.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "one is made, and looked at, each time that a key was interrupted")]
pub enum Found {
    /// It was done: this is the answer, for this request and all retries, as far as the layer stores it.
    Done(Answer),
    /// Nothing happened and nothing will: it is run, as if it were new.
    NothingHappened,
    /// It may be done again, since its receiver honours the downstream key: it is run, as the next attempt.
    RunAgain,
    /// Nothing is known yet: the client is told so.
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_verdicts_are_those_of_the_docs() {
        for status in 100..=599 {
            let expected = match status {
                401 | 403 | 408 | 413 | 415 | 422 | 429 => Verdict::Release,
                100..=199 => Verdict::KeepWithoutBody,
                _ => Verdict::Keep,
            };
            assert_eq!(Verdict::by_status(StatusCode::from_u16(status).unwrap()), expected, "{status}");
        }
    }

    #[test]
    fn what_is_of_one_answer_or_one_connection_is_not_stored() {
        let mut headers = HeaderMap::new();
        let lines = [
            ("x-first", "1"),
            ("set-cookie", "secret"),
            ("connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("date", "now"),
            ("transfer-encoding", "chunked"),
            ("content-encoding", "gzip"),
            ("x-second", "2"),
            ("x-first", "3"),
        ];
        for (name, value) in lines {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let names = |headers: &HeaderMap| headers.iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>();
        assert_eq!(names(&StoredHeaders::new().of(&headers)), ["x-first", "x-first", "content-encoding", "x-second"]);
        let with_cookies = StoredHeaders::new().allow(&SET_COOKIE).deny(&HeaderName::from_static("x-first"));
        assert_eq!(names(&with_cookies.of(&headers)), ["set-cookie", "content-encoding", "x-second"]);
        let only = StoredHeaders::only([HeaderName::from_static("x-hop"), HeaderName::from_static("x-second")]);
        assert_eq!(names(&only.of(&headers)), ["content-encoding", "x-second"], "nobody can read the body without it");
        assert_eq!(names(&only.deny(&CONTENT_ENCODING).of(&headers)), ["x-second"], "it was said aloud");
    }
}
