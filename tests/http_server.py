"""A server of HTTP for tests, to which many clients connect at once."""

from http.server import ThreadingHTTPServer


class HttpServer(ThreadingHTTPServer):
    """Keeps as many connections waiting as clients make; Python's own keeps five, and the system drops the others."""

    request_queue_size = 512
