"""The web page of ``bridge-memory serve``, and the JSON API behind it.

On the standard library's ``http.server``: one person's page on their own machine needs no more, and so the command is
there wherever the package is, in a training container too, without another package beside its pins.

``serve`` (the command) -> ``server`` (HTTP, who may ask) -> ``api`` (questions and answers) -> ``options`` (a question
as a RunSpec), ``fixes`` (a refusal with what to click), ``jobs`` and ``worker`` (what takes long, in a process of its
own).
"""
